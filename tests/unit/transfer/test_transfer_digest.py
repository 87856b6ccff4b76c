"""Digests of a handoff: equal on both sides whatever the shapes, and not after any one byte has changed."""

from __future__ import annotations

import random

import pytest
from transfer_shapes import make_shape

from pdd.base.ids import PageId
from pdd.memory.shape import KvShape
from pdd.transfer.digest import DigestPlan, source_digests, target_digests
from pdd.transfer.plan import block_tokens, lacking_blocks, leg_pieces, num_phases, plan_legs

SHAPES = {
    "equal": (make_shape(1, 2), make_shape(1, 2)),
    "two ranks to one": (make_shape(2, 4), make_shape(1, 4)),
    "one rank to four": (make_shape(1, 4), make_shape(4, 4)),
    "smaller source pages": (make_shape(2, 4, 2, num_pages=16), make_shape(1, 4, 4)),
    "larger source pages": (make_shape(1, 2, 8), make_shape(2, 2, 4)),
    "a latent that every rank holds": (make_shape(4, 1, num_planes=1), make_shape(2, 1, num_planes=1)),
}


class Case:
    """13 tokens of which the target has four, in pages at random, handed over byte by byte as the plan says."""

    def __init__(self, source: KvShape, target: KvShape) -> None:
        rng = random.Random(7)
        self.plan = DigestPlan(source=source, target=target, seed=5, start_token=source_start(target), num_tokens=13)
        self.source_arenas = [bytearray(rng.randbytes(source.layout.arena_bytes)) for _ in range(source.tp)]
        self.target_arenas = [bytearray(rng.randbytes(target.layout.arena_bytes)) for _ in range(target.tp)]
        num_source, num_target = source.layout.num_pages_for(13), target.layout.num_pages_for(13)
        self.source_pages = [PageId(page) for page in rng.sample(range(source.layout.num_pages), num_source)]
        target_pages = [PageId(page) for page in rng.sample(range(target.layout.num_pages), num_target)]
        self.target_pages = target_pages[self.plan.start_token // target.layout.page_tokens :]
        self.moved: list[tuple[int, int]] = []
        """(target rank, offset) of each byte."""
        self.move(source, target, target_pages)

    def move(self, source: KvShape, target: KvShape, target_pages: list[PageId]) -> None:
        size, phases = block_tokens(source, target), num_phases(source, target)
        for leg in plan_legs(source, target, self.plan.seed):
            pieces = leg_pieces(source, target, leg)
            for layer in range(source.layout.num_layers):
                for block in lacking_blocks(source, target, self.plan.start_token, 13):
                    from_page = self.source_pages[block * size // source.layout.page_tokens]
                    to_page = target_pages[block * size // target.layout.page_tokens]
                    for piece in pieces[block % phases]:
                        start = source.layout.offset_bytes(layer, from_page) + piece.source_offset_bytes
                        to = target.layout.offset_bytes(layer, to_page) + piece.target_offset_bytes
                        self.target_arenas[leg.target_rank][to : to + piece.length_bytes] = self.source_arenas[
                            leg.source_rank
                        ][start : start + piece.length_bytes]
                        self.moved += [(leg.target_rank, to + byte) for byte in range(piece.length_bytes)]

    def of_source(self) -> tuple[int, ...]:
        return source_digests(self.plan, self.source_pages, list(map(memoryview, self.source_arenas)))

    def of_target(self) -> tuple[int, ...]:
        return target_digests(self.plan, self.target_pages, list(map(memoryview, self.target_arenas)))


def source_start(target: KvShape) -> int:
    """The first page is in the target's cache already."""
    return target.layout.page_tokens


@pytest.fixture(params=SHAPES)
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*SHAPES[request.param])


def test_both_sides_find_the_same(case: Case) -> None:
    assert case.of_source() == case.of_target()


def test_every_moved_byte_counts(case: Case) -> None:
    expected = case.of_source()
    for rank, offset in random.Random(1).sample(case.moved, 100):
        case.target_arenas[rank][offset] ^= 1
        assert case.of_target() != expected
        case.target_arenas[rank][offset] ^= 1
    assert case.of_target() == expected


def test_no_other_byte_counts(case: Case) -> None:
    expected, moved = case.of_target(), set(case.moved)
    for rank, arena in enumerate(case.target_arenas):
        for offset in range(len(arena)):
            if (rank, offset) not in moved:
                arena[offset] ^= 0xFF
    assert case.of_target() == expected


def test_pages_that_changed_places_are_noticed() -> None:
    case = Case(*SHAPES["equal"])
    case.target_pages.reverse()
    assert case.of_target() != case.of_source()
