"""The prefill half of a messenger: tickets become writes, chunk by chunk, and every write is accounted for.

ticket -> accept -> Source -> announce -> Write -> (waits while the port is busy) -> port -> WriteDone -> Sent
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

from pdd.base.errors import BadTicket, FabricBusy, FabricError, InvariantBroken
from pdd.base.ids import Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.port import FabricPort, Token, Watch, Write, WriteDone
from pdd.memory.layout import KvLayout
from pdd.transfer.half import Half
from pdd.transfer.source import Chunk, Connection, LocalArena, RemoteArena, Source, check_ticket
from pdd.wire.messages import PrefillRequest


class Sending(Half):
    def __init__(self, port: FabricPort, layout: KvLayout, arena_address: int) -> None:
        super().__init__(port, layout, arena_address)
        self._watch: Watch | None = None
        self._local: LocalArena | None = None
        self._connections: dict[tuple[Incarnation, ReplicaName], Connection] = {}
        self._sources: dict[RequestId, Source] = {}
        self._by_token: dict[Token, Source] = {}
        self._waiting: deque[Write] = deque()
        self._num_tokens = 0

    def connect(self, peer: Incarnation, replica: ReplicaName, address: bytes) -> None:
        """Makes a target replica reachable. Another address is another life of that replica: what was under way to
        the old one stops. Raises FabricError."""
        known = self._connections.get((peer, replica))
        if known is not None and known.address == address:
            return
        if known is not None:
            self._drop(known, f"{replica} has a new fabric address")
        if self._local is None:
            memory = self._port.register(self._arena_address, self._layout.arena_bytes).memory
            self._local = LocalArena(layout=self._layout, address=self._arena_address, memory=memory)
        handle = self._port.add_peer(address)
        self._connections[peer, replica] = Connection(peer=peer, replica=replica, address=address, handle=handle)

    def disconnect(self, peer: Incarnation) -> None:
        """The link is lost: all that is under way to the peer stops."""
        for connection in [it for it in self._connections.values() if it.peer == peer]:
            self._drop(connection, f"the link of {connection.replica} was lost")

    def accept(self, ticket: PrefillRequest, peer: Incarnation, key: int, base: int, target: KvLayout) -> None:
        """Opens a handoff to the ticket's target replica, whose memory `key` and `base` name. Raises BadTicket, or
        FabricError when the port has failed."""
        self._require_port()
        connection = self._connections.get((peer, ticket.target_replica))
        if connection is None or self._local is None:
            raise BadTicket(f"target_replica: {ticket.target_replica[:100]} of {peer} is not connected")
        check_ticket(ticket, connection, self._layout, target)
        if ticket.request in self._sources:
            raise BadTicket(f"request: {ticket.request[:100]} is still being handed off from here")
        connection.consume(ticket.immediate)
        remote = RemoteArena(layout=target, base=base, key=key)
        self._sources[ticket.request] = Source(ticket, connection, self._local, remote)

    def announce(
        self, request: RequestId, start: int, end: int, *, last: bool, pages: Sequence[PageId], counter_base: int | None
    ) -> None:
        """Sends what positions `start ... end - 1` complete; `pages` hold those positions.

        Called before the step that computes them: layer l goes out when the counter is at `counter_base + l + 1`.
        None: all layers are in place. A handoff that has stopped meanwhile sends nothing.
        """
        source = self._sources.get(request)
        if source is None or source.stop_reason is not None:
            self.counters.ignored += 1
            return
        if counter_base is not None and self._watch is None:
            raise InvariantBroken(f"{request}: a chunk waits for a layer counter that this replica does not have")
        self._num_tokens += 1
        token = Token(self._num_tokens)
        chunk = Chunk(start=start, end=end, last=last, pages=tuple(pages), counter_base=counter_base)
        write = source.write(token, chunk, self._watch)
        if write is not None:
            self._by_token[token] = source
            self._waiting.append(write)
            self._submit()

    def stop(self, request: RequestId, reason: str = "stopped") -> None:
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
                self._stop(source, f"a write to {source.connection.replica} was not taken: {error}")
                continue  # `_stop` has removed all that waited for this handoff
            self._waiting.popleft()

    def _write_done(self, event: WriteDone) -> None:
        source = self._by_token.pop(event.token, None)
        if source is None:
            self.counters.ignored += 1
            return
        source.written(event.token, event.num_pieces, event.num_bytes)
        if event.error:
            self._stop(source, f"a write to {source.connection.replica} failed: {os.strerror(event.error)}")
        else:
            self._settle(source)

    def _stop(self, source: Source, reason: str) -> None:
        if source.stop_reason is None:
            source.stop_reason = reason
            waiting = {write.token for write in self._waiting if self._by_token[write.token] is source}
            self._waiting = deque(write for write in self._waiting if write.token not in waiting)
            source.outstanding -= waiting
            for token in waiting:
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

    def _drop(self, connection: Connection, reason: str) -> None:
        for source in [it for it in self._sources.values() if it.connection is connection]:
            self._stop(source, reason)
        self._port.drop_peer(connection.handle)
        del self._connections[connection.peer, connection.replica]

    def _check_sources(self) -> list[str]:
        owners = {token: source for source in self._sources.values() for token in source.outstanding}
        problems = [f"write {it.token} waits, but nobody owns it" for it in self._waiting if it.token not in owners]
        if self._by_token != owners:
            problems.append(f"{len(self._by_token)} writes are known, {len(owners)} are outstanding")
        for source in self._sources.values():
            to = source.connection
            if source.end() is not None:
                problems.append(f"{source.request}: has ended and is still open")
            if source.stop_reason is None and self._connections.get((to.peer, to.replica)) is not to:
                problems.append(f"{source.request}: sends to {to.replica}, which is not connected")
        return problems
