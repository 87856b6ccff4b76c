"""Which pages a chunk sends, which bytes of them, and how many pieces the target has to count. Pure.

A sequence's KV is a row of pages of `page_tokens` positions. The target lacks the pages from `start_token` on; prefill
chunks cut the row anywhere:

    positions    0        16        32        48   53
    pages        |    0    |    1    |    2    | 3 |
    chunks       |--- first ---|-- second --|- last -|
    sent             0              1         2   3

A page is sent by the chunk that completes it, a last page that stays partial by the last chunk. So every page of every
layer is sent exactly once whatever the chunks are, and both sides know the count before the first byte moves.
"""

from __future__ import annotations

from pdd.fabric.port import Piece
from pdd.memory.layout import KvLayout

_COMPARED_FIELDS = ("num_layers", "num_kv_heads", "head_dim", "page_tokens", "dtype")


def incompatibilities(source: KvLayout, target: KvLayout) -> tuple[str, ...]:
    """Why pages of one cannot be written into the other: each field that differs, with both values. Empty: they can."""
    return tuple(
        f"{field}: {getattr(source, field)} at the prefiller, {getattr(target, field)} at the decoder"
        for field in _COMPARED_FIELDS
        if getattr(source, field) != getattr(target, field)
    )


def page_pieces(source: KvLayout, target: KvLayout) -> tuple[Piece, ...]:
    """The runs of bytes that carry a source page into its target page. Both must be compatible."""
    assert not incompatibilities(source, target)
    return (Piece(source_offset_bytes=0, target_offset_bytes=0, length_bytes=source.page_bytes),)


def expected_pieces(layout: KvLayout, num_pages: int) -> int:
    """What a target with this layout counts for `num_pages` pages: pieces of all layers."""
    return layout.num_layers * num_pages * len(page_pieces(layout, layout))


def lacking_pages(layout: KvLayout, start_token: int, num_tokens: int) -> range:
    """The pages (by their place in the sequence) that a target needs which has the KV of `start_token` positions, a
    multiple of `page_tokens`, out of `num_tokens`."""
    return range(start_token // layout.page_tokens, layout.num_pages_for(num_tokens))


def completed_pages(layout: KvLayout, start: int, end: int, *, last: bool) -> range:
    """The pages (by their place in the sequence) that a chunk of positions `start ... end - 1` completes."""
    return range(start // layout.page_tokens, layout.num_pages_for(end) if last else end // layout.page_tokens)
