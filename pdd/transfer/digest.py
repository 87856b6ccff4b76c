"""Between arrived and ready, where the topology says `handoff.verify: pages`: do both sides hold the same bytes?

A digest is a CRC-32 of the bytes that one leg of the plan carries, in an order that both sides know: layer by layer,
block by block, piece by piece. Each side reads its own arenas, whatever its ranks, its page size and its NICs are.
ADR 0013 says why, and what it costs.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence

import msgspec

from pdd.base.ids import PageId
from pdd.fabric.port import Piece
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.transfer.plan import Leg, block_tokens, lacking_blocks, leg_pieces, num_phases, plan_legs


class DigestPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One handoff as the ticket describes it: positions `start_token ... num_tokens - 1`."""

    source: KvShape
    target: KvShape
    seed: int
    start_token: int
    num_tokens: int

    @property
    def legs(self) -> tuple[Leg, ...]:
        return plan_legs(self.source, self.target, self.seed)

    def pieces(self, leg: Leg) -> tuple[tuple[Piece, ...], ...]:
        """For each phase."""
        return leg_pieces(self.source, self.target, leg)


Runs = list[list[tuple[int, int]]]
"""For each phase what a leg carries of a block: (offset in the page, length), in bytes."""


def source_digests(plan: DigestPlan, pages: Sequence[PageId], arenas: Sequence[memoryview]) -> tuple[int, ...]:
    """Of each leg, as the source has it. `pages`: those of the whole sequence, from position 0 on; `arenas`: of each
    rank."""
    digests = []
    for leg in plan.legs:
        runs = [[(it.source_offset_bytes, it.length_bytes) for it in pieces] for pieces in plan.pieces(leg)]
        places = list(_places(plan, plan.source.layout, pages, runs))
        digests.append(_digest(plan.source.layout, arenas[leg.source_rank], places))
    return tuple(digests)


def target_digests(plan: DigestPlan, pages: Sequence[PageId], arenas: Sequence[memoryview]) -> tuple[int, ...]:
    """Of each leg, as the target has it. `pages`: those of the ticket, from position `start_token` on."""
    before = [PageId(-1)] * (plan.start_token // plan.target.layout.page_tokens)
    digests = []
    for leg in plan.legs:
        runs = [[(it.target_offset_bytes, it.length_bytes) for it in pieces] for pieces in plan.pieces(leg)]
        places = list(_places(plan, plan.target.layout, [*before, *pages], runs))
        digests.append(_digest(plan.target.layout, arenas[leg.target_rank], places))
    return tuple(digests)


def _places(plan: DigestPlan, layout: KvLayout, pages: Sequence[PageId], runs: Runs) -> Iterator[tuple[int, int]]:
    """Where every run of every block is: (offset in a layer, length)."""
    size, phases = block_tokens(plan.source, plan.target), num_phases(plan.source, plan.target)
    for block in lacking_blocks(plan.source, plan.target, plan.start_token, plan.num_tokens):
        page = pages[block * size // layout.page_tokens]
        for offset, length in runs[block % phases]:
            yield page * layout.page_bytes + offset, length


def _digest(layout: KvLayout, arena: memoryview, places: Sequence[tuple[int, int]]) -> int:
    digest = 0
    for base in range(0, layout.arena_bytes, layout.layer_bytes):
        for start, length in places:
            digest = zlib.crc32(arena[base + start : base + start + length], digest)
    return digest
