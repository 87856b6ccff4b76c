"""One handoff at its source, over all ranks: what each chunk sends by which leg, and the end of them all."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from pdd.base.errors import InvariantBroken
from pdd.base.ids import PageId
from pdd.memory.shape import KvShape
from pdd.transfer.events import Sent, Stopped
from pdd.transfer.plan import (
    completed_blocks,
    lacking_blocks,
    lacking_pages,
    leg_pieces,
    page_pairs,
    plan_legs,
)
from pdd.transfer.source import Parcel
from pdd.wire.messages import PrefillRequest


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `start ... end - 1`, in `pages` of every rank, of a sequence of `end` positions if it is the `last`."""

    start: int
    end: int
    last: bool
    pages: tuple[PageId, ...]


class Outbound:
    def __init__(self, ticket: PrefillRequest, own: KvShape, target: KvShape) -> None:
        num_tokens = len(ticket.prompt) - 1
        self.legs = plan_legs(own, target, ticket.seed)
        self._blocks = lacking_blocks(own, target, ticket.start_token, num_tokens)
        self.request = ticket.request
        self.immediate = ticket.immediates[0]
        self.source_ranks = sorted({leg.source_rank for leg in self.legs})
        self.ends: dict[int, Sent | Stopped] = {}
        """Of the source ranks whose part is over."""
        self.stopping = False
        self._own = own
        self._target = target
        self._target_pages = array("I", ticket.target_pages)
        self._first_page = lacking_pages(target.layout, ticket.start_token, num_tokens).start
        self._next_block = self._blocks.start
        self._pieces = {leg: leg_pieces(own, target, leg) for leg in self.legs}

    def targets_of(self, source_rank: int) -> list[int]:
        """The ranks that it sends to."""
        return [leg.target_rank for leg in self.legs if leg.source_rank == source_rank]

    @property
    def complete(self) -> bool:
        """Everything has been put into parcels."""
        return self._next_block == self._blocks.stop

    def parcels(self, chunk: Chunk) -> dict[int, list[Parcel]]:
        """For each source rank what the chunk completes of that which the target lacks; empty when it is nothing.

        Raises InvariantBroken, with nothing changed, when the chunk does not go on where the one before ended.
        """
        done = completed_blocks(self._own, self._target, chunk.start, chunk.end, last=chunk.last)
        blocks = range(max(done.start, self._next_block), max(done.stop, self._next_block))
        self._check(chunk, done)
        self._next_block = blocks.stop
        parcels: dict[int, list[Parcel]] = {}
        chunk_pages = array("I", chunk.pages)
        first_page = chunk.start // self._own.layout.page_tokens
        for pairs in page_pairs(self._own, self._target, blocks):
            source_pages = _pick(chunk_pages, pairs.source_pages, first_page)
            target_pages = _pick(self._target_pages, pairs.target_pages, self._first_page)
            for leg in self.legs:
                parcel = Parcel(
                    target_rank=leg.target_rank,
                    source_pages=source_pages,
                    target_pages=target_pages,
                    pieces=self._pieces[leg][pairs.phase],
                )
                parcels.setdefault(leg.source_rank, []).append(parcel)
        return parcels

    def _check(self, chunk: Chunk, done: range) -> None:
        whole = done.stop == self._blocks.stop if chunk.last else done.stop <= self._blocks.stop
        layout = self._own.layout
        num_pages = layout.num_pages_for(chunk.end) - chunk.start // layout.page_tokens
        pages_fit = num_pages <= len(chunk.pages) and _all_below(layout.num_pages, chunk.pages)
        if done.start > self._next_block or not whole or not pages_fit:
            raise InvariantBroken(
                f"{self.request}: {chunk} was announced when block {self._next_block} of {self._blocks.stop} was the "
                "next to be sent"
            )

    def end(self) -> Sent | Stopped | None:
        """How it ended, when every source rank's part has."""
        if len(self.ends) < len(self.source_ranks):
            return None
        num_pieces = tuple(map(sum, zip(*(it.num_pieces for it in self.ends.values()), strict=True)))
        stopped = [it for it in self.ends.values() if isinstance(it, Stopped)]
        if stopped:
            return Stopped(
                request=self.request, immediate=self.immediate, num_pieces=num_pieces, reason=stopped[0].reason
            )
        num_bytes = sum(it.num_bytes for it in self.ends.values() if isinstance(it, Sent))
        return Sent(request=self.request, immediate=self.immediate, num_pieces=num_pieces, num_bytes=num_bytes)


def _pick(pages: array[int], places: range, first_place: int) -> array[int]:
    """Those at some places of a sequence; `pages` are those from `first_place` on."""
    return pages[places.start - first_place : places.stop - first_place : places.step]


def _all_below(limit: int, pages: Sequence[int]) -> bool:
    """In C: chunks have a thousand pages, and nothing computes while their numbers are looked at."""
    return not pages or (min(pages) >= 0 and max(pages) < limit)
