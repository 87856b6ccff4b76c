"""Which source rank sends what to which target rank, and how many pieces each has to count. Pure.

A source and a target share the model, and may differ in everything else: in tensor parallelism, so that a target rank's
heads lie with several source ranks or are a part of one's; and in `page_tokens`, where one divides the other.

Heads: a `Leg` is a source rank, a target rank and a run of heads that both hold. The legs to a target rank cover its
heads exactly once. Where several source ranks hold the same heads, the seed chooses.

    source tp 2, 4 heads      legs to target tp 1       legs to target tp 4
    rank 0: 0 1               0 -> 0: heads 0 1         0 -> 0: head 0, 0 -> 1: head 1
    rank 1: 2 3               1 -> 0: heads 2 3         1 -> 2: head 2, 1 -> 3: head 3

Tokens: a sequence's KV is a row of blocks of `block_tokens`, the smaller of the two page sizes. Block q is a part (or
all) of one source page and of one target page. The target lacks the blocks from `start_token` on; prefill chunks cut
the row anywhere:

    positions        0        16        32        48   53
    source pages     |    0    |    1    |    2    | 3 |         page_tokens 16
    target pages     |         0         |      1      |         page_tokens 32
    blocks           |    0    |    1    |    2    | 3 |
    chunks           |--- first ---|-- second --|- last -|
    sent                 0              1         2   3

A block is sent by the chunk that completes it, a last block that stays partial by the last chunk. So every block of
every layer is sent exactly once whatever the chunks are, and both sides know the count before the first byte moves.

Through which NICs a rank's pieces leave and arrive is no part of this: its port deals them, and counts them together.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from pdd.fabric.port import Piece
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape

MAX_PIECE_BYTES = 512 * 1024
"""Of what one message carries (JOINED_BYTES in native/pdd_port.h): longer runs are several pieces."""
_COMPARED_FIELDS = ("num_layers", "num_planes", "head_dim", "dtype")


class Leg(msgspec.Struct, frozen=True):
    """One source rank's part in filling one target rank's pages."""

    source_rank: int
    target_rank: int
    heads: range
    """Heads of the model that travel; both ranks hold all of them."""


class PagePairs(msgspec.Struct, frozen=True):
    """Blocks of one phase: what travels between the two pages of each pair are the same pieces."""

    phase: int
    source_pages: range
    """By their place in the sequence."""
    target_pages: range


def incompatibilities(source: KvShape, target: KvShape) -> tuple[str, ...]:
    """Why pages of one cannot be written into the other: each field that does not fit, with both values. Empty: they
    can. `tp` may differ, and `page_tokens` where one divides the other."""
    broken = [
        f"{where}: {problem}" for where, it in (("prefiller", source), ("decoder", target)) for problem in it.problems()
    ]
    if broken:
        return tuple(broken)
    pairs = {"num_kv_heads": (source.num_kv_heads, target.num_kv_heads)}
    pairs |= {field: (getattr(source.layout, field), getattr(target.layout, field)) for field in _COMPARED_FIELDS}
    differing = [_difference(field, *values) for field, values in pairs.items() if values[0] != values[1]]
    small, big = sorted((source.layout.page_tokens, target.layout.page_tokens))
    if big % small:
        sizes = _difference("page_tokens", source.layout.page_tokens, target.layout.page_tokens)
        differing.append(f"{sizes} (neither divides the other)")
    return tuple(differing)


def _difference(field: str, source: object, target: object) -> str:
    return f"{field}: {source} at the prefiller, {target} at the decoder"


# Heads.


def plan_legs(source: KvShape, target: KvShape, seed: int) -> tuple[Leg, ...]:
    """Who sends what to whom. The shapes must be compatible.

    Ranks that hold the same heads take turns in an order that is shuffled anew for each round: whoever numbers his
    requests 0, 1, 2 ... loads them evenly, and seeds at random do so on average.
    """
    return tuple(leg for rank in range(target.tp) for leg in legs_to(source, target, rank, seed))


def legs_to(source: KvShape, target: KvShape, target_rank: int, seed: int) -> Iterator[Leg]:
    """Those that fill one target rank's pages, by their heads."""
    heads = target.heads_of(target_rank)
    first = heads.start
    while first < heads.stop:
        source_rank = _choose(source, target, first, target_rank, seed)
        last = min(heads.stop, source.heads_of(source_rank).stop)
        yield Leg(source_rank, target_rank, range(first, last))
        first = last


def _choose(source: KvShape, target: KvShape, head: int, target_rank: int, seed: int) -> int:
    """The source rank that serves a target rank with a head."""
    holders = source.ranks_with(head)
    takers = target.ranks_with(head)
    round_, place = divmod(seed * len(takers) + takers.index(target_rank), len(holders))
    random.Random(round_).shuffle(holders)  # noqa: S311 (both sides of a test must draw the same)
    return holders[place]


# Tokens.


def block_tokens(source: KvShape, target: KvShape) -> int:
    """Positions that always travel together."""
    return min(source.layout.page_tokens, target.layout.page_tokens)


def num_phases(source: KvShape, target: KvShape) -> int:
    """Blocks in a page of the side that has the larger ones: block q is number q % num_phases in its page."""
    return max(source.layout.page_tokens, target.layout.page_tokens) // block_tokens(source, target)


def lacking_pages(layout: KvLayout, start_token: int, num_tokens: int) -> range:
    """The pages (by their place in the sequence) that a target needs which has the KV of `start_token` positions, a
    multiple of its `page_tokens`, out of `num_tokens`."""
    return range(start_token // layout.page_tokens, layout.num_pages_for(num_tokens))


def lacking_blocks(source: KvShape, target: KvShape, start_token: int, num_tokens: int) -> range:
    """The blocks that lie in those pages and have positions of the sequence."""
    size = block_tokens(source, target)
    return range(start_token // size, -(-num_tokens // size))


def completed_blocks(source: KvShape, target: KvShape, start: int, end: int, *, last: bool) -> range:
    """The blocks that a chunk of positions `start ... end - 1` completes, after the chunks before it."""
    size = block_tokens(source, target)
    return range(start // size, -(-end // size) if last else end // size)


def page_pairs(source: KvShape, target: KvShape, blocks: range) -> Iterator[PagePairs]:
    """Where blocks lie, phase by phase."""
    size, phases = block_tokens(source, target), num_phases(source, target)
    for first in blocks[:phases]:
        same = range(first, blocks.stop, phases)
        yield PagePairs(
            phase=first % phases,
            source_pages=_places(same, size, source.layout.page_tokens),
            target_pages=_places(same, size, target.layout.page_tokens),
        )


def _places(same: range, size: int, page_tokens: int) -> range:
    """Of the pages where blocks of one phase lie: every so many pages are as large as a block, all others follow each
    other."""
    first, step = same.start * size // page_tokens, same.step * size // page_tokens
    return range(first, first + step * len(same), step)


# Bytes.


def leg_pieces(source: KvShape, target: KvShape, leg: Leg) -> tuple[tuple[Piece, ...], ...]:
    """For each phase the runs of bytes that a leg carries from a source page into its target page, as long as what is
    contiguous on both sides allows. Equally many in each phase."""
    return tuple(_phase_pieces(source, target, leg, phase) for phase in range(num_phases(source, target)))


def _phase_pieces(source: KvShape, target: KvShape, leg: Leg, phase: int) -> tuple[Piece, ...]:
    size = block_tokens(source, target)
    source_head = source.heads_of(leg.source_rank).start
    target_head = target.heads_of(leg.target_rank).start
    source_token = phase * size % source.layout.page_tokens
    target_token = phase * size % target.layout.page_tokens
    pieces: list[Piece] = []
    for plane in range(source.layout.num_planes):
        for head in leg.heads:
            run = Piece(
                source_offset_bytes=source.layout.row_offset_bytes(plane, head - source_head, source_token),
                target_offset_bytes=target.layout.row_offset_bytes(plane, head - target_head, target_token),
                length_bytes=size * source.layout.row_bytes,
            )
            if pieces and _continues(pieces[-1], run):
                run = Piece(
                    pieces[-1].source_offset_bytes,
                    pieces[-1].target_offset_bytes,
                    pieces.pop().length_bytes + run.length_bytes,
                )
            pieces.append(run)
    return tuple(part for piece in pieces for part in split(piece))


def split(piece: Piece) -> Iterator[Piece]:
    """The same bytes in pieces of MAX_PIECE_BYTES, the last of what is left."""
    for start in range(0, piece.length_bytes, MAX_PIECE_BYTES):
        yield Piece(
            source_offset_bytes=piece.source_offset_bytes + start,
            target_offset_bytes=piece.target_offset_bytes + start,
            length_bytes=min(MAX_PIECE_BYTES, piece.length_bytes - start),
        )


def _continues(before: Piece, run: Piece) -> bool:
    return (
        before.source_offset_bytes + before.length_bytes == run.source_offset_bytes
        and before.target_offset_bytes + before.length_bytes == run.target_offset_bytes
    )


def expected_pieces(source: KvShape, target: KvShape, target_rank: int, blocks: range) -> int:
    """What a target rank counts for a handoff of the lacking `blocks`: pieces of all layers from all source ranks."""
    per_block = sum(len(_phase_pieces(source, target, leg, 0)) for leg in legs_to(source, target, target_rank, seed=0))
    return target.layout.num_layers * len(blocks) * per_block


def expected_bytes(source: KvShape, target: KvShape, blocks: range) -> int:
    """Bytes of those pieces; the same for every target rank."""
    layout = target.layout
    block_bytes = layout.num_planes * layout.num_kv_heads * block_tokens(source, target) * layout.row_bytes
    return layout.num_layers * len(blocks) * block_bytes
