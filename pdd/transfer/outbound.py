"""One handoff at its source, over all ports: what each chunk sends by which lane, and the end of them all."""

from __future__ import annotations

import msgspec

from pdd.base.errors import InvariantBroken
from pdd.base.ids import PageId
from pdd.memory.shape import KvShape
from pdd.transfer.events import Sent, Stopped
from pdd.transfer.plan import (
    Lane,
    Stripes,
    completed_blocks,
    lacking_blocks,
    lacking_pages,
    leg_pieces,
    page_pairs,
    plan_lanes,
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
    def __init__(self, ticket: PrefillRequest, own: KvShape, own_nics: int, target: KvShape) -> None:
        num_tokens = len(ticket.prompt) - 1
        legs = plan_legs(own, target, ticket.seed)
        self._blocks = lacking_blocks(own, target, ticket.start_token, num_tokens)
        self.request = ticket.request
        self.immediate = ticket.immediates[0]
        self._stripes = Stripes(ticket.num_nics, ticket.seed)
        self.lanes = plan_lanes(legs, self._blocks, own_nics, self._stripes)
        self.source_ports = sorted({lane.source_port for lane in self.lanes})
        self.ends: dict[int, Sent | Stopped] = {}
        """Of the source ports whose part is over."""
        self.stopping = False
        self._own = own
        self._target = target
        self._target_pages = ticket.target_pages
        self._first_page = lacking_pages(target.layout, ticket.start_token, num_tokens).start
        self._next_block = self._blocks.start
        self._last_block = {self._stripes.nic_of(block): block for block in self._blocks}
        """Of each target NIC."""
        self._pieces = {leg: leg_pieces(own, target, leg) for leg in legs}

    def lanes_from(self, source_port: int) -> list[Lane]:
        return [lane for lane in self.lanes if lane.source_port == source_port]

    def complete(self, source_port: int) -> bool:
        """Everything of that port has been put into parcels."""
        return all(self._last_block[lane.target_nic] < self._next_block for lane in self.lanes_from(source_port))

    def parcels(self, chunk: Chunk) -> dict[int, list[Parcel]]:
        """For each source port what the chunk completes of that which the target lacks; empty when it is nothing.

        Raises InvariantBroken, with nothing changed, when the chunk does not go on where the one before ended.
        """
        done = completed_blocks(self._own, self._target, chunk.start, chunk.end, last=chunk.last)
        blocks = range(max(done.start, self._next_block), max(done.stop, self._next_block))
        self._check(chunk, done)
        self._next_block = blocks.stop
        parcels: dict[int, list[Parcel]] = {}
        first_page = chunk.start // self._own.layout.page_tokens
        for pairs in page_pairs(self._own, self._target, blocks, self._stripes):
            source_pages = tuple(chunk.pages[page - first_page] for page in pairs.source_pages)
            target_pages = tuple(self._target_pages[page - self._first_page] for page in pairs.target_pages)
            for lane in self.lanes:
                if lane.target_nic != pairs.target_nic:
                    continue
                parcel = Parcel(
                    target_port=lane.target_port,
                    source_pages=source_pages,
                    target_pages=target_pages,
                    pieces=self._pieces[lane.leg][pairs.phase],
                )
                parcels.setdefault(lane.source_port, []).append(parcel)
        return parcels

    def _check(self, chunk: Chunk, done: range) -> None:
        whole = done.stop == self._blocks.stop if chunk.last else done.stop <= self._blocks.stop
        layout = self._own.layout
        num_pages = layout.num_pages_for(chunk.end) - chunk.start // layout.page_tokens
        pages_fit = num_pages <= len(chunk.pages) and all(0 <= page < layout.num_pages for page in chunk.pages)
        if done.start > self._next_block or not whole or not pages_fit:
            raise InvariantBroken(
                f"{self.request}: {chunk} was announced when block {self._next_block} of {self._blocks.stop} was the "
                "next to be sent"
            )

    def end(self) -> Sent | Stopped | None:
        """How it ended, when every source port's part has."""
        if len(self.ends) < len(self.source_ports):
            return None
        num_pieces = tuple(map(sum, zip(*(it.num_pieces for it in self.ends.values()), strict=True)))
        stopped = [it for it in self.ends.values() if isinstance(it, Stopped)]
        if stopped:
            return Stopped(
                request=self.request, immediate=self.immediate, num_pieces=num_pieces, reason=stopped[0].reason
            )
        num_bytes = sum(it.num_bytes for it in self.ends.values() if isinstance(it, Sent))
        return Sent(request=self.request, immediate=self.immediate, num_pieces=num_pieces, num_bytes=num_bytes)
