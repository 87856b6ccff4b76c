"""Which heads each rank holds, and shapes that are none."""

from __future__ import annotations

import msgspec
import pytest

from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape, heads_of


def shape(tp: int, num_heads: int, /, **changes: object) -> KvShape:
    layout = KvLayout(
        num_layers=2, num_kv_heads=len(heads_of(0, tp, num_heads)), head_dim=4, page_tokens=8, dtype="float32",
        num_pages=5,
    )  # fmt: skip
    return KvShape(tp=tp, num_kv_heads=num_heads, layout=msgspec.structs.replace(layout, **changes))


@pytest.mark.parametrize(
    ("tp", "num_kv_heads", "ranks"),
    [
        (1, 3, [[0, 1, 2]]),
        (2, 4, [[0, 1], [2, 3]]),
        (4, 2, [[0], [0], [1], [1]]),
        (3, 1, [[0], [0], [0]]),
    ],
)
def test_heads_are_sharded_then_doubled(tp: int, num_kv_heads: int, ranks: list[list[int]]) -> None:
    it = shape(tp, num_kv_heads)
    assert [list(it.heads_of(rank)) for rank in range(tp)] == ranks
    for head in range(num_kv_heads):
        assert it.ranks_with(head) == [rank for rank in range(tp) if head in ranks[rank]]
    assert it.problems() == ()


def test_numbers_that_do_not_divide_are_named() -> None:
    with pytest.raises(ValueError, match="tp 2 and 3 KV heads"):
        heads_of(0, 2, 3)
    assert msgspec.structs.replace(shape(1, 3), tp=2).problems() == ("tp 2 and 3 KV heads: neither divides the other",)


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (msgspec.structs.replace(shape(1, 2), tp=0), "tp: 0"),
        (msgspec.structs.replace(shape(1, 2), num_kv_heads=-1), "num_kv_heads: -1"),
        (shape(1, 2, page_tokens=0), "page_tokens: 0"),
        (shape(1, 2, head_dim=0), "head_dim: 0"),
        (shape(1, 2, num_layers=0), "num_layers: 0"),
        (shape(1, 2, num_planes=0), "num_planes: 0"),
        (shape(1, 2, num_kv_heads=0), "num_kv_heads: 0"),
        (shape(1, 2, dtype="int7"), "int7"),
        (shape(2, 2, num_kv_heads=2), "layout.num_kv_heads: 2, but tp 2 of 2: 1"),
    ],
)
def test_what_a_peer_claims_may_be_no_shape(broken: KvShape, words: str) -> None:
    assert any(words in problem for problem in broken.problems())


def test_the_digest_knows_who_holds_what_but_not_how_many_pages() -> None:
    one = shape(2, 4)
    assert one.digest() == shape(2, 4, num_pages=99).digest()
    others = [shape(1, 4), shape(4, 4), shape(2, 2), shape(2, 4, page_tokens=16), shape(2, 4, num_planes=1)]
    assert len({it.digest() for it in [one, *others]}) == 1 + len(others)


def test_rows_lie_plane_by_plane_and_head_by_head() -> None:
    layout = shape(1, 3).layout
    offsets = [layout.row_offset_bytes(p, h, t) for p in range(2) for h in range(3) for t in range(8)]
    assert offsets == list(range(0, layout.page_bytes, layout.row_bytes))
