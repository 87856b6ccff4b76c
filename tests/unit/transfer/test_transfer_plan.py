"""The planner: which chunk sends which page."""

from __future__ import annotations

import msgspec

from pdd.memory.layout import KvLayout
from pdd.transfer.plan import completed_pages, expected_pieces, incompatibilities, lacking_pages, page_pieces

LAYOUT = KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, page_tokens=16, dtype="float32", num_pages=10)


def test_a_chunk_sends_what_it_completes() -> None:
    assert completed_pages(LAYOUT, 0, 27, last=False) == range(1)
    assert completed_pages(LAYOUT, 27, 48, last=False) == range(1, 3)
    assert completed_pages(LAYOUT, 48, 53, last=True) == range(3, 4)
    assert completed_pages(LAYOUT, 48, 53, last=False) == range(3, 3)
    assert completed_pages(LAYOUT, 0, 1, last=True) == range(1)
    assert completed_pages(LAYOUT, 0, 16, last=True) == range(1)


def test_what_the_target_lacks() -> None:
    assert lacking_pages(LAYOUT, 0, 1) == range(1)
    assert lacking_pages(LAYOUT, 32, 53) == range(2, 4)
    assert lacking_pages(LAYOUT, 16, 17) == range(1, 2)


def test_the_count_is_pages_times_layers() -> None:
    assert expected_pieces(LAYOUT, 4) == 12
    assert sum(piece.length_bytes for piece in page_pieces(LAYOUT, LAYOUT)) == LAYOUT.page_bytes


def test_layouts_that_do_not_fit_name_the_fields_with_both_values() -> None:
    other = msgspec.structs.replace(LAYOUT, page_tokens=32, dtype="bfloat16", num_pages=99)
    assert incompatibilities(LAYOUT, other) == (
        "page_tokens: 16 at the prefiller, 32 at the decoder",
        "dtype: float32 at the prefiller, bfloat16 at the decoder",
    )
    assert incompatibilities(LAYOUT, msgspec.structs.replace(LAYOUT, num_pages=99)) == ()


def test_every_field_that_the_digest_covers_is_compared() -> None:
    changes: dict[str, object] = {
        "num_layers": 4, "num_kv_heads": 3, "head_dim": 8, "page_tokens": 8, "dtype": "bfloat16"
    }  # fmt: skip
    for field, value in changes.items():
        other = msgspec.structs.replace(LAYOUT, **{field: value})
        assert other.digest() != LAYOUT.digest()
        assert len(incompatibilities(LAYOUT, other)) == 1
