"""The KV messenger of a replica set: every handoff that it sends or receives, between ticket and ready.

    decoder                                             prefiller
      grant     a key of each rank for this peer ---->    connect
      arm       the counts, then the ticket --------->    accept
      .                                                   announce   each chunk, before it runs
      .         <==== pages, layer by layer: legs ====    .
      Arrived   every rank's count is complete            Sent       pages may be reused

    and where it goes wrong
      stopped   <------ numbers of pieces posted -----    stop -> Stopped
      Drained   all of those were counted
      revoke -> Drained (fenced)                          disconnect -> Stopped

The planner (plan.py) says which source rank sends what to which target rank; the Messenger of each rank moves its part,
and here the parts are one handoff again. It ends in exactly one of Sent and Stopped at its source, and of Arrived and
Drained at its target, when the last rank's part has ended: until then no page of it may be used for anything else. One
part that fails stops the others. A message that fits no open handoff (late, doubled, unknown) changes nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pdd.base.errors import BadTicket, InvariantBroken, PddError
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.port import PeerInfo, RegisteredMemory
from pdd.memory.shape import KvShape
from pdd.transfer.events import Arrived, Drained, PortBroken, Sent, Stopped, Stray, TransferEvent
from pdd.transfer.half import TransferCounters
from pdd.transfer.inbound import Inbound
from pdd.transfer.messenger import Messenger
from pdd.transfer.outbound import Chunk, Outbound
from pdd.transfer.plan import expected_bytes, expected_pieces, incompatibilities, lacking_blocks
from pdd.transfer.source import TargetRank
from pdd.transfer.ticket import TargetReplica, check_ticket
from pdd.wire.messages import Grant, PrefillRequest

__all__ = [
    "Arrived",
    "BadTicket",
    "Drained",
    "MessengerGroup",
    "PortBroken",
    "Sent",
    "Stopped",
    "Stray",
    "TransferEvent",
]


class MessengerGroup:
    """`ranks`: the messengers of a replica set of that shape. Those of prefillers all watch the layer counter of rank
    0's executor, each through a Watch (and an eventfd) of its own port."""

    def __init__(self, shape: KvShape, ranks: Sequence[Messenger]) -> None:
        if len(ranks) != shape.tp:
            raise InvariantBroken(f"{len(ranks)} messengers for {shape.tp} ranks")
        self.shape = shape
        self._ranks = tuple(ranks)
        self._inbound: dict[RequestId, Inbound] = {}
        self._outbound: dict[RequestId, Outbound] = {}
        self._replicas: dict[tuple[Incarnation, ReplicaName], TargetReplica] = {}
        self._counters = TransferCounters()

    @property
    def fences(self) -> bool:
        """True when `revoke` makes a peer's pages safe at once; else each handoff waits for `expire`."""
        return all(rank.info.fences for rank in self._ranks)

    @property
    def counters(self) -> TransferCounters:
        """Sums over the ranks and what the group itself has seen."""
        every = [self._counters, *(rank.counters for rank in self._ranks)]
        names = TransferCounters.__struct_fields__
        return TransferCounters(**{name: sum(getattr(it, name) for it in every) for name in names})

    def filenos(self) -> tuple[int, ...]:
        """One for each rank; `poll` when any is readable."""
        return tuple(rank.fileno() for rank in self._ranks)

    # The target.

    def grant(self, peer: Incarnation) -> tuple[RegisteredMemory, ...]:
        """For each rank a key to its arena for that peer alone; the same ones until revoked. Raises FabricError."""
        return tuple(rank.grant(peer) for rank in self._ranks)

    def grants(self, peer: Incarnation, replica: ReplicaName) -> list[Grant]:
        """Those keys as messages to the peer; `replica` is our name there."""
        return [
            Grant(replica=replica, rank=rank, address=memory.address) for rank, memory in enumerate(self.grant(peer))
        ]

    def arm(
        self, request: RequestId, peer: Incarnation, source: KvShape, start_token: int, num_tokens: int
    ) -> tuple[Immediate, ...]:
        """Arms every rank's count of a handoff from a replica set of shape `source`: positions `start_token` (a
        multiple of our page_tokens) `... num_tokens - 1`. Returns the ticket's immediates; it may leave afterwards.

        Raises QueueFull or FabricError, with nothing armed.
        """
        misfits = incompatibilities(source, self.shape)
        if request in self._inbound or misfits:
            raise InvariantBroken(
                f"{request}: cannot arm it: armed already: {request in self._inbound}; misfits: {misfits or 'none'}"
            )
        for messenger in self._ranks:
            messenger.require_port()
        blocks = lacking_blocks(source, self.shape, start_token, num_tokens)
        num_bytes = expected_bytes(source, self.shape, blocks)
        immediates: list[Immediate] = []
        try:
            for rank, messenger in enumerate(self._ranks):
                num_pieces = expected_pieces(source, self.shape, rank, blocks)
                immediates.append(messenger.arm(request, peer, num_pieces, num_bytes))
        except PddError:
            for messenger in self._ranks[: len(immediates)]:
                messenger.disarm(request)
            raise
        self._inbound[request] = Inbound(request=request, peer=peer, immediates=tuple(immediates))
        return tuple(immediates)

    def arrived(self, request: RequestId) -> tuple[int, int]:
        """Pieces in place, and expected, on all ranks; (0, 0) for an unknown handoff."""
        parts = [rank.arrived(request) for rank in self._ranks]
        return sum(placed for placed, _ in parts), sum(expected for _, expected in parts)

    def stopped(self, request: RequestId, immediate: Immediate, num_pieces: Sequence[int]) -> None:
        """The prefiller posted that many pieces to each rank and posts no more: Drained once they are counted."""
        inbound = self._open_inbound(request, immediate)
        if inbound is None:
            return
        if len(num_pieces) != len(self._ranks):
            self._counters.contradictions += 1
            return
        for rank in inbound.open_ranks:
            self._ranks[rank].stopped(request, inbound.immediates[rank], num_pieces[rank])

    def rejected(self, request: RequestId, immediate: Immediate) -> None:
        """Nothing was or will be posted: Drained."""
        inbound = self._open_inbound(request, immediate)
        if inbound is None:
            return
        if self.arrived(request)[0]:
            self._counters.contradictions += 1
            return
        for rank in inbound.open_ranks:
            self._ranks[rank].rejected(request, inbound.immediates[rank])

    def revoke(self, peer: Incarnation) -> None:
        """Closes the peer's keys. Where the provider fences (`fences`), its handoffs are drained by that; elsewhere
        each waits for `expire`, or for the counts if those are still reached."""
        for rank in self._ranks:
            rank.revoke(peer)

    def expire(self, request: RequestId) -> None:
        """The provider's own bound for late writes of a revoked peer has passed: Drained. Others are left alone."""
        for rank in self._ranks:
            rank.expire(request)

    def forget(self, request: RequestId) -> None:
        """Frees what an arrived handoff still holds; unknown ones hold nothing."""
        inbound = self._inbound.get(request)
        if inbound is None:
            return
        if not inbound.over:
            raise InvariantBroken(f"{request}: forgotten while {inbound.peer} may still write into its pages")
        self._forget(inbound)

    def _forget(self, inbound: Inbound) -> None:
        del self._inbound[inbound.request]
        for rank in inbound.arrived_ranks:
            self._ranks[rank].forget(inbound.request)

    def _open_inbound(self, request: RequestId, immediate: Immediate) -> Inbound | None:
        inbound = self._inbound.get(request)
        if inbound is None or inbound.immediates[0] != immediate or inbound.over:
            self._counters.ignored += 1
            return None
        return inbound

    # The source.

    def connect(self, peer: Incarnation, grant: Grant) -> None:
        """A target rank lets us write to it. A grant that differs from an earlier one is of another life of that rank:
        what was under way to the old one stops."""
        key = peer, grant.replica
        replica = self._replicas.setdefault(key, TargetReplica(peer=peer, name=grant.replica))
        if replica.grants.get(grant.rank) == grant:
            return
        replica.renew(grant)
        old = TargetRank(peer, grant.replica, grant.rank)
        for rank in self._ranks:
            rank.drop(old, f"{old} has a new fabric address")

    def keep(self, peer: Incarnation, names: Collection[ReplicaName]) -> None:
        """Of the peer's replica sets there are only these: what is under way to others stops."""
        for _, name in [it for it in self._replicas if it[0] == peer and it[1] not in names]:
            for number in self._replicas.pop((peer, name)).grants:
                for rank in self._ranks:
                    rank.drop(TargetRank(peer, name, number), f"{name} is no more")

    def disconnect(self, peer: Incarnation) -> None:
        """The link is lost: all that is under way to the peer stops."""
        for key in [it for it in self._replicas if it[0] == peer]:
            del self._replicas[key]
        for rank in self._ranks:
            rank.disconnect(peer)

    def ways(self, peer: Incarnation) -> list[PeerInfo]:
        """How each of the peer's ranks is reached that pages have gone to."""
        return [info for rank in self._ranks for info in rank.ways(peer)]

    def accept(self, ticket: PrefillRequest, peer: Incarnation, target: KvShape) -> None:
        """Opens a handoff to the ticket's target replica, which was announced with the shape `target`. Raises
        BadTicket, or FabricError when a port has failed or cannot reach a target rank."""
        for rank in self._ranks:
            rank.require_port()
        replica = self._replicas.get((peer, ticket.target_replica))
        if replica is None:
            raise BadTicket(f"target_replica: {ticket.target_replica[:100]} of {peer} is not connected")
        check_ticket(ticket, replica, self.shape, target)
        if ticket.request in self._outbound:
            raise BadTicket(f"request: {ticket.request[:100]} is still being handed off from here")
        outbound = Outbound(ticket, self.shape, target)
        destinations = [replica.destination(ticket, rank, target) for rank in range(target.tp)]
        for leg in outbound.legs:
            self._ranks[leg.source_rank].connect(
                destinations[leg.target_rank].to, replica.grants[leg.target_rank].address
            )
        replica.consume(ticket)
        self._outbound[ticket.request] = outbound
        for number in outbound.source_ranks:
            served = [destinations[rank] for rank in outbound.targets_of(number)]
            self._ranks[number].open(ticket.request, ticket.immediates, served)

    def announce(
        self, request: RequestId, start: int, end: int, *, last: bool, pages: Sequence[PageId], counter_base: int | None
    ) -> None:
        """Sends what positions `start ... end - 1` complete; `pages` (of every rank) hold those positions.

        Called before the step that computes them: layer l goes out when the counter is at `counter_base + l + 1`.
        None: all layers are in place. A handoff that has stopped meanwhile sends nothing.
        """
        outbound = self._outbound.get(request)
        if outbound is None or outbound.stopping:
            self._counters.ignored += 1
            return
        parcels = outbound.parcels(Chunk(start=start, end=end, last=last, pages=tuple(pages)))
        for rank, of_rank in parcels.items():
            self._ranks[rank].send(request, of_rank, counter_base=counter_base, last=outbound.complete)

    def stop(self, request: RequestId, reason: str = "stopped") -> None:
        """Posts nothing more: Stopped once all that was posted has ended. Ended handoffs stay ended."""
        outbound = self._outbound.get(request)
        if outbound is None:
            self._counters.ignored += 1
        else:
            self._stop(outbound, reason)

    def _stop(self, outbound: Outbound, reason: str) -> None:
        if outbound.stopping:
            return
        outbound.stopping = True
        for rank in outbound.source_ranks:
            if rank not in outbound.ends:
                self._ranks[rank].stop(outbound.request, reason)

    # Both.

    def poll(self) -> list[TransferEvent]:
        """What has happened since the last poll, oldest first."""
        events: list[TransferEvent] = []
        moved = True
        while moved:  # what one rank's event makes another do is told at once
            moved = False
            for number, rank in enumerate(self._ranks):
                for event in rank.poll():
                    moved = True
                    self._take(number, event, events)
        return events

    def close(self) -> None:
        """Ends all handoffs and the ports. A last poll afterwards tells how they ended."""
        for rank in self._ranks:
            rank.close()

    def check(self) -> list[str]:
        """What contradicts itself: empty in a healthy group."""
        problems = [f"rank {number}: {it}" for number, rank in enumerate(self._ranks) for it in rank.check()]
        problems += [f"{it.request}: every source rank's part is over, yet it is open"
                     for it in self._outbound.values() if it.end() is not None]  # fmt: skip
        problems += [f"{it.request}: is over without all of its pieces, yet open"
                     for it in self._inbound.values() if it.over and isinstance(it.end(), Drained)]  # fmt: skip
        return problems

    def _take(self, rank: int, event: TransferEvent, events: list[TransferEvent]) -> None:
        match event:
            case Arrived() | Drained():
                self._part_received(rank, event, events)
            case Sent() | Stopped():
                self._part_sent(rank, event, events)
            case Stray():
                events.append(event)
            case PortBroken():
                events.append(event)
                self._port_broken(rank)

    def _part_received(self, rank: int, event: Arrived | Drained, events: list[TransferEvent]) -> None:
        inbound = self._inbound[event.request]
        inbound.ends[rank] = event
        if inbound.over:
            end = inbound.end()
            events.append(end)
            if isinstance(end, Drained):
                self._forget(inbound)

    def _part_sent(self, rank: int, event: Sent | Stopped, events: list[TransferEvent]) -> None:
        outbound = self._outbound[event.request]
        outbound.ends[rank] = event
        if isinstance(event, Stopped):
            self._stop(outbound, event.reason)
        end = outbound.end()
        if end is not None:
            del self._outbound[event.request]
            events.append(end)

    def _port_broken(self, rank: int) -> None:
        """No handoff can be whole any more: what the other ranks do ends too."""
        for outbound in list(self._outbound.values()):
            self._stop(outbound, f"the fabric port of rank {rank} failed")
        for peer in dict.fromkeys(it.peer for it in self._inbound.values()):
            self.revoke(peer)
