"""The prefill half of one handoff on one source rank: from the accepted ticket to the end of its last write."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from pdd.base.ids import Immediate, Incarnation, ReplicaName, RequestId
from pdd.fabric.port import Memory, Peer, Piece, Token, Watch, Write
from pdd.memory.layout import KvLayout
from pdd.transfer.events import Sent, Stopped


class TargetRank(msgspec.Struct, frozen=True):
    """Somebody to write to: a rank of a replica set, in one life of its node."""

    peer: Incarnation
    replica: ReplicaName
    rank: int

    def __str__(self) -> str:
        return f"{self.replica} rank {self.rank}"


class Connection(msgspec.Struct, frozen=True):
    to: TargetRank
    handle: Peer


class Destination(msgspec.Struct, frozen=True, kw_only=True):
    """Where a handoff's pages are on one target rank."""

    to: TargetRank
    layout: KvLayout
    immediate: Immediate


class Parcel(msgspec.Struct, frozen=True, kw_only=True):
    """Page pairs that travel to one target rank, all by the same pieces."""

    target_rank: int
    source_pages: array[int]
    target_pages: array[int]
    """Arrays of "I", of PageIds."""
    pieces: tuple[Piece, ...]


class LocalArena(msgspec.Struct, frozen=True, kw_only=True):
    """Where source pages are read."""

    layout: KvLayout
    address: int
    memory: Memory


class Source:
    """Bookkeeping only: it makes the writes and sums up their ends, the messenger talks to the port."""

    def __init__(
        self, request: RequestId, immediates: Sequence[Immediate], ways: Sequence[tuple[Connection, Destination]]
    ) -> None:
        self.request = request
        self.outstanding: dict[Token, int] = {}
        """Target ranks of the writes that were made and have not ended, those that wait for a free slot of the port
        included."""
        self.stop_reason: str | None = None
        self.complete = False
        """Nothing more will be given to `write`."""
        self._immediate = immediates[0]
        self._ways = {destination.to.rank: (connection, destination) for connection, destination in ways}
        self._num_pieces = [0] * len(immediates)
        self._num_bytes = 0

    def sends_through(self, connection: Connection) -> bool:
        return any(connection is used for used, _ in self._ways.values())

    @property
    def connections(self) -> list[Connection]:
        return [connection for connection, _ in self._ways.values()]

    def name_of(self, token: Token) -> str:
        """The target of an outstanding write."""
        return str(self._ways[self.outstanding[token]][1].to)

    def write(self, token: Token, local: LocalArena, parcel: Parcel, watch: Watch | None, counter_base: int) -> Write:
        connection, destination = self._ways[parcel.target_rank]
        self.outstanding[token] = parcel.target_rank
        return Write(
            token=token,
            peer=connection.handle,
            memory=local.memory,
            immediate=destination.immediate,
            num_layers=local.layout.num_layers,
            source_base=local.address,
            source_layer_bytes=local.layout.layer_bytes,
            source_page_bytes=local.layout.page_bytes,
            target_base=0,
            target_layer_bytes=destination.layout.layer_bytes,
            target_page_bytes=destination.layout.page_bytes,
            source_pages=parcel.source_pages,
            target_pages=parcel.target_pages,
            pieces=parcel.pieces,
            watch=watch,
            counter_base=counter_base,
        )

    def withdrawn(self, token: Token) -> None:
        """The port never got that write."""
        del self.outstanding[token]

    def written(self, token: Token, num_pieces: int, num_bytes: int) -> None:
        self._num_pieces[self.outstanding.pop(token)] += num_pieces
        self._num_bytes += num_bytes

    def end(self) -> Sent | Stopped | None:
        """How it ended, if it has."""
        if self.outstanding:
            return None
        pieces = tuple(self._num_pieces)
        if self.stop_reason is not None:
            return Stopped(request=self.request, immediate=self._immediate, num_pieces=pieces, reason=self.stop_reason)
        if not self.complete:
            return None
        return Sent(request=self.request, immediate=self._immediate, num_pieces=pieces, num_bytes=self._num_bytes)
