"""The prefill half of one handoff: from an accepted ticket to the end of its last write."""

from __future__ import annotations

import math

import msgspec

from pdd.base.errors import BadTicket, InvariantBroken
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import generation_of, pack, slot_of
from pdd.fabric.port import Memory, Peer, Token, Watch, Write
from pdd.memory.layout import KvLayout
from pdd.transfer.events import Sent, Stopped
from pdd.transfer.plan import completed_pages, incompatibilities, lacking_pages, page_pieces
from pdd.wire.messages import PrefillRequest


class LocalArena(msgspec.Struct, frozen=True, kw_only=True):
    """Where source pages are read."""

    layout: KvLayout
    address: int
    memory: Memory


class RemoteArena(msgspec.Struct, frozen=True, kw_only=True):
    """Where one target's pages are, and the key that it gave us."""

    layout: KvLayout
    base: int
    key: int


class Connection(msgspec.Struct, frozen=True, kw_only=True):
    """A target replica of one incarnation of its node."""

    peer: Incarnation
    replica: ReplicaName
    address: bytes
    handle: Peer
    generations: dict[int, int] = {}
    """Of each of its slots the generation that we have served last: a ticket is good for one handoff."""

    def consume(self, immediate: Immediate) -> None:
        self.generations[slot_of(immediate)] = generation_of(immediate)

    def is_consumed(self, immediate: Immediate) -> bool:
        return self.generations.get(slot_of(immediate)) == generation_of(immediate)


class Chunk(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `start ... end - 1`, in `pages`, of a sequence of `end` positions if it is the `last`."""

    start: int
    end: int
    last: bool
    pages: tuple[PageId, ...]
    counter_base: int | None
    """The layer counter before they are computed; None: they are."""


class Source:
    """Bookkeeping only: it makes the writes and sums up their ends, the messenger talks to the port."""

    def __init__(self, ticket: PrefillRequest, connection: Connection, local: LocalArena, remote: RemoteArena) -> None:
        self.request: RequestId = ticket.request
        self.immediate: Immediate = ticket.immediate
        self.connection = connection
        self.outstanding: set[Token] = set()
        """Writes that were made and have not ended, those that wait for a free slot of the port included."""
        self.stop_reason: str | None = None
        self._local = local
        self._remote = remote
        self._target_pages = ticket.target_pages
        self._lacking = lacking_pages(local.layout, ticket.start_token, len(ticket.prompt) - 1)
        self._next_page = self._lacking.start
        self._num_pieces = 0
        self._num_bytes = 0

    def write(self, token: Token, chunk: Chunk, watch: Watch | None) -> Write | None:
        """The write of one chunk; None when the target lacks none of the pages that it completes.

        Raises InvariantBroken, with nothing changed, when the chunk does not go on where the one before ended.
        """
        layout = self._local.layout
        done = completed_pages(layout, chunk.start, chunk.end, last=chunk.last)
        first = max(done.start, self._next_page)
        stop = max(done.stop, first)
        self._check_chunk(chunk, done)
        self._next_page = stop
        if first == stop:
            return None
        self.outstanding.add(token)
        remote = self._remote
        return Write(
            token=token,
            peer=self.connection.handle,
            memory=self._local.memory,
            key=remote.key,
            immediate=self.immediate,
            num_layers=layout.num_layers,
            source_base=self._local.address,
            source_layer_bytes=layout.layer_bytes,
            source_page_bytes=layout.page_bytes,
            target_base=remote.base,
            target_layer_bytes=remote.layout.layer_bytes,
            target_page_bytes=remote.layout.page_bytes,
            source_pages=chunk.pages[first - done.start : stop - done.start],
            target_pages=self._target_pages[first - self._lacking.start : stop - self._lacking.start],
            pieces=page_pieces(layout, remote.layout),
            watch=None if chunk.counter_base is None else watch,
            counter_base=chunk.counter_base or 0,
        )

    def _check_chunk(self, chunk: Chunk, done: range) -> None:
        end = self._lacking.stop
        whole = done.stop == end if chunk.last else done.stop <= end
        pages_fit = len(done) <= len(chunk.pages) and all(
            0 <= page < self._local.layout.num_pages for page in chunk.pages
        )
        if done.start > self._next_page or not whole or not pages_fit:
            raise InvariantBroken(
                f"{self.request}: {chunk} was announced when page {self._next_page} of {end} was the next to be sent"
            )

    def written(self, token: Token, num_pieces: int, num_bytes: int) -> None:
        self.outstanding.discard(token)
        self._num_pieces += num_pieces
        self._num_bytes += num_bytes

    def end(self) -> Sent | Stopped | None:
        """How it ended, if it has."""
        if self.outstanding:
            return None
        if self.stop_reason is not None:
            return Stopped(
                request=self.request, immediate=self.immediate, num_pieces=self._num_pieces, reason=self.stop_reason
            )
        if self._next_page < self._lacking.stop:
            return None
        return Sent(
            request=self.request, immediate=self.immediate, num_pieces=self._num_pieces, num_bytes=self._num_bytes
        )


def check_ticket(ticket: PrefillRequest, connection: Connection, own: KvLayout, target: KvLayout) -> None:
    """Raises BadTicket, naming every field that is wrong. What passes can only be written where its pages say."""
    num_tokens = len(ticket.prompt) - 1
    pages = ticket.target_pages
    faults = list(incompatibilities(own, target))
    if ticket.target_incarnation != connection.peer:
        faults.append(f"target_incarnation: {ticket.target_incarnation[:40]} came over the link of {connection.peer}")
    if ticket.layout_digest != own.digest():
        faults.append(f"layout_digest: {ticket.layout_digest[:40]}, ours is {own.digest()}")
    if ticket.start_token % own.page_tokens or not 0 <= ticket.start_token < num_tokens:
        faults.append(f"start_token: {ticket.start_token} is no multiple of {own.page_tokens} below {num_tokens}")
    elif len(pages) != (num_lacking := len(lacking_pages(own, ticket.start_token, num_tokens))):
        faults.append(f"target_pages: {len(pages)} for {num_lacking} pages of KV")
    if len(set(pages)) != len(pages):
        faults.append("target_pages: a page stands there twice")
    if not all(0 <= page < target.num_pages for page in pages):
        faults.append(f"target_pages: some are outside of the target's {target.num_pages}")
    if not 0 <= ticket.immediate < 1 << 32 or ticket.immediate != pack(
        slot_of(ticket.immediate), generation_of(ticket.immediate)
    ):
        faults.append(f"immediate: {ticket.immediate} is none")
    elif connection.is_consumed(ticket.immediate):
        faults.append(f"immediate: {ticket.immediate} was used by an earlier ticket")
    if not (ticket.lease_s > 0 and math.isfinite(ticket.lease_s)):
        faults.append(f"lease_s: {ticket.lease_s}")
    if faults:
        raise BadTicket(f"ticket {ticket.request[:100]} of {connection.replica}: " + "; ".join(faults))
