"""The planner: who sends what to whom, in how many pieces."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from transfer_shapes import make_shape

from pdd.fabric.port import Piece
from pdd.memory.shape import KvShape
from pdd.transfer.plan import (
    Leg,
    PagePairs,
    completed_blocks,
    expected_bytes,
    expected_pieces,
    incompatibilities,
    lacking_blocks,
    lacking_pages,
    leg_pieces,
    page_pairs,
    plan_legs,
)

EQUAL = make_shape(page_tokens=16)


def test_a_chunk_sends_what_it_completes() -> None:
    assert completed_blocks(EQUAL, EQUAL, 0, 27, last=False) == range(1)
    assert completed_blocks(EQUAL, EQUAL, 27, 48, last=False) == range(1, 3)
    assert completed_blocks(EQUAL, EQUAL, 48, 53, last=True) == range(3, 4)
    assert completed_blocks(EQUAL, EQUAL, 48, 53, last=False) == range(3, 3)
    assert completed_blocks(EQUAL, EQUAL, 0, 1, last=True) == range(1)
    assert completed_blocks(EQUAL, EQUAL, 0, 16, last=True) == range(1)


def test_what_the_target_lacks() -> None:
    assert lacking_pages(EQUAL.layout, 0, 1) == range(1)
    assert lacking_pages(EQUAL.layout, 32, 53) == range(2, 4)
    larger = make_shape(page_tokens=32)
    assert lacking_blocks(EQUAL, larger, 32, 53) == lacking_blocks(larger, EQUAL, 32, 53) == range(2, 4)
    assert lacking_pages(larger.layout, 32, 53) == range(1, 2)


def test_small_pages_fill_large_ones_and_large_ones_are_cut() -> None:
    small, large = make_shape(page_tokens=16), make_shape(page_tokens=32)
    assert list(page_pairs(small, large, range(1, 5))) == [
        PagePairs(phase=1, source_pages=range(1, 4, 2), target_pages=range(2)),
        PagePairs(phase=0, source_pages=range(2, 5, 2), target_pages=range(1, 3)),
    ]
    assert list(page_pairs(large, small, range(1, 4))) == [
        PagePairs(phase=1, source_pages=range(2), target_pages=range(1, 4, 2)),
        PagePairs(phase=0, source_pages=range(1, 2), target_pages=range(2, 3)),
    ]
    assert list(page_pairs(small, small, range(3, 6))) == [PagePairs(0, range(3, 6), range(3, 6))]
    assert list(page_pairs(small, large, range(3, 3))) == []


def test_legs_of_finer_prefillers_and_finer_decoders() -> None:
    one, four = make_shape(1, 4), make_shape(4, 4)
    assert plan_legs(four, one, 0) == tuple(Leg(rank, 0, range(rank, rank + 1)) for rank in range(4))
    assert plan_legs(one, four, 0) == tuple(Leg(0, rank, range(rank, rank + 1)) for rank in range(4))
    two, three = make_shape(2, 6), make_shape(3, 6)
    assert plan_legs(two, three, 0) == (
        Leg(0, 0, range(2)), Leg(0, 1, range(2, 3)), Leg(1, 1, range(3, 4)), Leg(1, 2, range(4, 6)),
    )  # fmt: skip


def test_doubled_heads_come_from_one_of_those_who_hold_them() -> None:
    eight, two = make_shape(8, 2), make_shape(2, 2)
    for seed in range(50):
        first, second = plan_legs(eight, two, seed)
        assert (first.source_rank in range(4), second.source_rank in range(4, 8)) == (True, True)
        assert (first.heads, second.heads) == (range(1), range(1, 2))
    assert len({plan_legs(eight, two, seed) for seed in range(50)}) > 2


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (make_shape(4, 1, num_planes=1), make_shape(1, 1, num_planes=1)),
        (make_shape(8, 1, num_planes=1), make_shape(4, 1, num_planes=1)),
        (make_shape(3, 1, num_planes=1), make_shape(2, 1, num_planes=1)),
        (make_shape(8, 1, num_planes=1), make_shape(8, 1, num_planes=1)),
        (make_shape(8, 4), make_shape(1, 4)),
        (make_shape(8, 2), make_shape(4, 2)),
    ],
    ids=["mla 4:1", "mla 8:4", "mla 3:2", "mla 8:8", "gqa 8:1", "gqa 8:4"],
)
@pytest.mark.parametrize("first_seed", [0, 12345678901])
def test_the_load_is_even_over_source_ranks(source: KvShape, target: KvShape, first_seed: int) -> None:
    num_heads = Counter[int]()
    for seed in range(first_seed, first_seed + 1000):
        for leg in plan_legs(source, target, seed):
            num_heads[leg.source_rank] += len(leg.heads)
    mean = num_heads.total() / source.tp
    assert len(num_heads) == source.tp
    assert all(abs(number - mean) <= 0.05 * mean for number in num_heads.values()), num_heads


def test_turns_are_shuffled() -> None:
    """Else two decoders that ask in step would always meet on the same rank."""
    source, target = make_shape(4, 1, num_planes=1), make_shape(1, 1, num_planes=1)
    rounds = {tuple(plan_legs(source, target, 4 * number + place)[0].source_rank for place in range(4))
              for number in range(100)}  # fmt: skip
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)
    assert len(rounds) > 15


@pytest.mark.parametrize(
    ("source", "target", "pieces_per_block"),
    [
        (make_shape(8, 8), make_shape(8, 8), [1] * 8),  # the whole page
        (make_shape(1, 8), make_shape(1, 8), [1]),
        (make_shape(4, 8), make_shape(1, 8), [4 * 2]),  # K and V from each source rank
        (make_shape(1, 8), make_shape(4, 8), [2] * 4),  # K and V of a range of heads
        (make_shape(2, 6), make_shape(3, 6), [2, 2 * 2, 2]),
        (make_shape(8, 2), make_shape(2, 2), [1, 1]),  # doubled heads: whole pages again
        (make_shape(2, 2), make_shape(8, 2), [1] * 8),
        (make_shape(8, 1, num_planes=1), make_shape(1, 1, num_planes=1), [1]),  # a latent
        (make_shape(1, 1, num_planes=1), make_shape(4, 1, num_planes=1), [1] * 4),
        (make_shape(1, 8, 16), make_shape(1, 8, 32), [2 * 8]),  # a run for each plane and head
        (make_shape(1, 8, 32), make_shape(1, 8, 16), [2 * 8]),
        (make_shape(4, 8, 16), make_shape(1, 8, 32), [2 * 8]),
        (make_shape(1, 8, 64), make_shape(4, 8, 16), [2 * 2] * 4),
        (make_shape(4, 1, 16, num_planes=1), make_shape(1, 1, 32, num_planes=1), [1]),
    ],
)  # fmt: skip
def test_as_few_pieces_as_contiguity_allows(source: KvShape, target: KvShape, pieces_per_block: list[int]) -> None:
    """24 tokens from token 0: pieces of a block, times blocks and layers, on each target rank."""
    blocks = lacking_blocks(source, target, 0, 24)
    num_pieces = [expected_pieces(source, target, rank, blocks) for rank in range(target.tp)]
    assert num_pieces == [2 * len(blocks) * number for number in pieces_per_block]


def test_equal_pages_travel_whole() -> None:
    shape = make_shape(2, 4)
    legs = plan_legs(shape, shape, 0)
    assert [leg_pieces(shape, shape, leg) for leg in legs] == [((Piece(0, 0, shape.layout.page_bytes),),)] * 2


def test_the_bytes_are_those_of_the_pages() -> None:
    shape = make_shape(2, 4)
    assert expected_bytes(shape, shape, lacking_blocks(shape, shape, 0, 24)) == 2 * 6 * shape.layout.page_bytes
    half = make_shape(1, 4, page_tokens=2)
    assert expected_bytes(half, shape, lacking_blocks(half, shape, 4, 7)) == 2 * 2 * shape.layout.page_bytes // 2


def test_shapes_that_do_not_fit_name_the_fields_with_both_values() -> None:
    source = make_shape(2, 4, page_tokens=16)
    other = make_shape(1, 8, page_tokens=24, dtype="bfloat16", num_pages=99)
    assert incompatibilities(source, other) == (
        "num_kv_heads: 4 at the prefiller, 8 at the decoder",
        "dtype: float32 at the prefiller, bfloat16 at the decoder",
        "page_tokens: 16 at the prefiller, 24 at the decoder (neither divides the other)",
    )


def test_tp_and_pages_that_divide_may_differ() -> None:
    source = make_shape(2, 4, page_tokens=16)
    for target in [make_shape(4, 4, 16), make_shape(8, 4, 16), make_shape(1, 4, 32), make_shape(2, 4, 8, num_pages=9)]:
        assert incompatibilities(source, target) == ()


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 4), ("num_planes", 1), ("head_dim", 8), ("dtype", "bfloat16")]
)
def test_every_other_field_must_be_equal(field: str, value: object) -> None:
    shape = make_shape(2, 4)
    other = msgspec.structs.replace(shape, layout=msgspec.structs.replace(shape.layout, **{field: value}))
    assert other.digest() != shape.digest()
    (fault,) = incompatibilities(shape, other)
    assert fault.startswith(f"{field}: ")


def test_what_is_no_shape_fits_nothing() -> None:
    shape = make_shape(2, 4)
    (fault,) = incompatibilities(shape, msgspec.structs.replace(shape, tp=3))
    assert fault == "decoder: tp 3 and 4 KV heads: neither divides the other"
