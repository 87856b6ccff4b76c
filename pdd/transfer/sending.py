"""The prefill half of a messenger: parcels become writes, and every write is accounted for.

open -> Source -> send -> Write -> (waits while the port is busy) -> port -> WriteDone -> Sent
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Sequence

from pdd.base.errors import FabricBusy, FabricError, InvariantBroken
from pdd.base.ids import Immediate, Incarnation, RequestId
from pdd.fabric.port import FabricPort, PeerInfo, Token, Watch, Write, WriteDone
from pdd.memory.layout import KvLayout
from pdd.transfer.half import Half
from pdd.transfer.source import Connection, Destination, LocalArena, Parcel, Source, TargetRank


class Sending(Half):
    def __init__(self, port: FabricPort, layout: KvLayout, arena_address: int, arena_fd: int) -> None:
        super().__init__(port, layout, arena_address, arena_fd)
        self._watch: Watch | None = None
        self._local: LocalArena | None = None
        self._connections: dict[TargetRank, Connection] = {}
        self._sources: dict[RequestId, Source] = {}
        self._by_token: dict[Token, Source] = {}
        self._waiting: deque[Write] = deque()
        self._num_tokens = 0

    def connect(self, to: TargetRank, address: bytes) -> None:
        """Makes a target rank reachable, if it is not. Raises FabricError."""
        self.require_port()
        if to in self._connections:
            return
        if self._local is None:
            memory = self._port.register(self._arena_address, self._layout.arena_bytes, self._arena_fd).memory
            self._local = LocalArena(layout=self._layout, address=self._arena_address, memory=memory)
        self._connections[to] = Connection(to, self._port.add_peer(address))

    def drop(self, to: TargetRank, reason: str) -> None:
        """All that is under way to a target rank stops; it may be connected anew."""
        connection = self._connections.get(to)
        if connection is None:
            return
        for source in [it for it in self._sources.values() if it.sends_through(connection)]:
            self._stop(source, reason)
        self._port.drop_peer(connection.handle)
        del self._connections[to]

    def disconnect(self, peer: Incarnation) -> None:
        """The link is lost: all that is under way to the peer stops."""
        for to in [it for it in self._connections if it.peer == peer]:
            self.drop(to, f"the link of {to.replica} was lost")

    def ways(self, peer: Incarnation) -> list[PeerInfo]:
        """How the peer's connected ranks are reached."""
        return [self._port.peer_info(it.handle) for to, it in self._connections.items() if to.peer == peer]

    def open(self, request: RequestId, immediates: Sequence[Immediate], destinations: Sequence[Destination]) -> None:
        """Begins a handoff: this rank's part goes to `destinations`, connected ones; `immediates` are those of all the
        target's ranks."""
        if request in self._sources or not all(it.to in self._connections for it in destinations):
            raise InvariantBroken(f"{request}: is handed off already, or its target is not connected: {destinations}")
        ways = [(self._connections[it.to], it) for it in destinations]
        self._sources[request] = Source(request, immediates, ways)

    def send(self, request: RequestId, parcels: Sequence[Parcel], *, counter_base: int | None, last: bool) -> None:
        """Sends layer l of the parcels' pages when the counter is at `counter_base + l + 1`. None: all layers are in
        place. A handoff that has stopped meanwhile sends nothing."""
        source = self._sources.get(request)
        if source is None or source.stop_reason is not None or self._local is None:
            self.counters.ignored += 1
            return
        if counter_base is not None and self._watch is None:
            raise InvariantBroken(f"{request}: a chunk waits for a layer counter that this port does not have")
        source.complete = last
        watch = None if counter_base is None else self._watch
        for parcel in parcels:
            self._num_tokens += 1
            token = Token(self._num_tokens)
            self._by_token[token] = source
            self._waiting.append(source.write(token, self._local, parcel, watch, counter_base or 0))
        self._submit()

    def stop(self, request: RequestId, reason: str) -> None:
        """Posts nothing more: Stopped once all that was posted has ended. Ended handoffs stay ended."""
        source = self._sources.get(request)
        if source is None:
            self.counters.ignored += 1
        else:
            self._stop(source, reason)

    def _submit(self) -> None:
        """Hands the waiting writes to the port, as far as it has room: an ending write makes some, and a poll follows
        that."""
        while self._waiting:
            write = self._waiting[0]
            try:
                self._port.write(write)
            except FabricBusy:
                self.counters.busy += 1
                return
            except FabricError as error:
                source = self._by_token[write.token]
                self._stop(source, f"a write to {source.name_of(write.token)} was not taken: {error}")
                continue  # `_stop` has removed all that waited for this handoff
            self._waiting.popleft()

    def _write_done(self, event: WriteDone) -> None:
        source = self._by_token.pop(event.token, None)
        if source is None:
            self.counters.ignored += 1
            return
        name = source.name_of(event.token)
        source.written(event.token, event.num_pieces, event.num_bytes)
        source.failed = source.failed or event.error not in (0, errno.ECANCELED)
        if event.error:
            self._stop(source, f"a write to {name} failed: {os.strerror(event.error)}")
        else:
            self._settle(source)

    def _stop(self, source: Source, reason: str) -> None:
        if source.stop_reason is None:
            source.stop_reason = reason
            waiting = {write.token for write in self._waiting if self._by_token[write.token] is source}
            self._waiting = deque(write for write in self._waiting if write.token not in waiting)
            for token in waiting:
                source.withdrawn(token)
                del self._by_token[token]
            for token in source.outstanding:
                self._port.cancel(token)
        self._settle(source)

    def _stop_all(self, reason: str) -> None:
        for source in list(self._sources.values()):
            self._stop(source, reason)

    def _settle(self, source: Source) -> None:
        end = source.end()
        if end is not None:
            del self._sources[source.request]
            self._events.append(end)

    def _check_sources(self) -> list[str]:
        owners = {token: source for source in self._sources.values() for token in source.outstanding}
        problems = [f"write {it.token} waits, but nobody owns it" for it in self._waiting if it.token not in owners]
        if self._by_token != owners:
            problems.append(f"{len(self._by_token)} writes are known, {len(owners)} are outstanding")
        for source in self._sources.values():
            if source.end() is not None:
                problems.append(f"{source.request}: has ended and is still open")
            lost = [it.to for it in source.connections if self._connections.get(it.to) is not it]
            if source.stop_reason is None and lost:
                problems.append(f"{source.request}: sends to {lost[0]}, which is not connected")
        return problems
