"""The node: the one owner of this daemon's state. Links, HTTP, the admin socket and replicas all call in here.

Everything runs in one event loop and nothing here awaits, so each call sees and leaves a whole state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog

from pdd.base.clock import Clock
from pdd.base.errors import BadRequest, FabricError, NoPath, PddError
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.decode import DecodeSide
from pdd.daemon.frontend import Frontend
from pdd.daemon.metrics import Metrics
from pdd.daemon.peers import Peer, PeerBook
from pdd.daemon.prefill import PrefillSide
from pdd.daemon.records import Record
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.side import Control
from pdd.daemon.stories import Stories
from pdd.lifecycle.events import error_info
from pdd.lifecycle.request import TokenOutput
from pdd.topology.model import Role, Topology
from pdd.transfer.plan import incompatibilities
from pdd.wire import messages as wire
from pdd.wire.links import Links

log = structlog.get_logger(__name__)


class Node:
    """Made before its links and replicas; `links` is set and `add_set` called as they come up."""

    links: Links

    def __init__(self, topology: Topology, name: NodeName, incarnation: Incarnation, clock: Clock) -> None:
        self.topology = topology
        self.name = name
        self.incarnation = incarnation
        self.clock = clock
        self.started_s = clock.now_s()
        self.metrics = Metrics()
        self.stories = Stories()
        self.peers = PeerBook()
        self.draining = False
        self.stopping = False
        """A signal was received: the drain is for good."""
        self.starting = True
        """Until every replica of this node is up."""
        self.replicas: dict[ReplicaName, ReplicaSet] = {}
        """Replica sets: each is a replica to everyone but replica.py."""
        self.down: dict[ReplicaName, str] = {}
        """Replicas of this node that have failed, and why."""
        self.frontend = Frontend(
            self.peers,
            self.send,
            clock=clock,
            metrics=self.metrics,
            retries=topology.handoff.retries,
            timeout_s=topology.limits.timeout_s,
        )
        self._decode: dict[ReplicaName, DecodeSide] = {}
        self._prefill: dict[ReplicaName, PrefillSide] = {}
        self._frontends: dict[RequestId, NodeName] = {}
        """Who asked for each request that is decoded here."""
        self._num_beats = 0
        self._last_beat_s = self.started_s
        self._control = Control(
            clock=clock,
            metrics=self.metrics,
            stories=self.stories,
            peers=self.peers,
            incarnation=incarnation,
            send=self.send,
            fence=self._fence,
            pair=lambda node: self._pair(self.peers.known(node)),
        )
        self.peers.up(name, incarnation)  # a node is its own peer: what is here is asked like what is there

    # Replicas.

    def add_set(self, replica: ReplicaSet) -> None:
        """It is up: its requests get a side, and the peers are told."""
        self.replicas[replica.name] = replica
        if replica.role is Role.PREFILL:
            replica.user = self._prefill[replica.name] = PrefillSide(self._control, replica)
        else:
            policy, timeout_s = self.topology.handoff, self.topology.limits.timeout_s
            replica.user = self._decode[replica.name] = DecodeSide(self._control, replica, policy, timeout_s)
        self.announce_to_all()
        for peer in self.peers:
            self._pair(peer)

    def shut_out_all(self, replica: ReplicaSet, reason: str) -> None:
        """Ends what still goes on between a set and any peer, as if every link were lost."""
        for peer in list(self.peers):
            self.side_of(replica).peer_down(peer.node, peer.incarnation, reason)

    def remove_set(self, replica: ReplicaSet) -> None:
        """It is no more."""
        for table in (self.replicas, self._decode, self._prefill):
            table.pop(replica.name, None)

    def side_of(self, replica: ReplicaSet) -> DecodeSide | PrefillSide:
        """What holds its requests."""
        return self._decode[replica.name] if replica.name in self._decode else self._prefill[replica.name]

    @property
    def late_s(self) -> float:
        """How long the event loop's next heartbeat is overdue; negative when it is not due yet."""
        return self.clock.now_s() - self._last_beat_s - self.topology.cluster.heartbeat_s

    @property
    def num_unfinished(self) -> int:
        """What a drain waits for: requests of either side, and answers that are streamed to clients. What this node
        does more than one of these for is one request all the same."""
        return len({record.id for record in self.running()} | self.frontend.asked)

    def drain(self, draining: bool) -> None:
        """Takes no new requests, or takes them again; the peers hear of it at once."""
        self.draining = draining
        load = self.load()
        for peer in list(self.peers):
            self.send(peer.node, load)

    def running(self) -> Iterator[Record]:
        """Requests that have not ended, of both sides."""
        for decode in self._decode.values():
            yield from decode.records.values()
        for prefill in self._prefill.values():
            yield from prefill.records.values()

    # What the links bring (wire.links.LinkUser).

    def link_up(self, peer: NodeName, incarnation: Incarnation) -> None:
        self.peers.up(peer, incarnation)
        self.metrics.peers_up.inc()
        self.send(peer, self._announcement())

    def link_down(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None:
        self.peers.down(peer)
        self.metrics.peers_up.dec()
        self._end_handoffs(peer, incarnation, reason)
        self.frontend.peer_down(peer, reason)
        for request in [request for request, node in self._frontends.items() if node == peer]:
            self._cancel(peer, wire.Cancel(request=request, stopped=False))

    def message(self, peer: NodeName, incarnation: Incarnation, message: wire.Message) -> None:
        match message:
            case wire.Load():
                self.peers.load(peer, message)
            case wire.Announce():
                self._pair(self.peers.announce(peer, message))
            case wire.Grant():
                self._granted(self.peers.known(peer), message)
            case wire.Submit():
                self._submitted(peer, message)
            case wire.Cancel():
                self._cancel(peer, message)
            case wire.Output():
                self.frontend.output(peer, message.output)
            case wire.PrefillRequest():
                self._prefill_asked(peer, incarnation, message)
            case wire.CancelPrefill():
                self._prefill_cancelled(peer, message)
            case _ if isinstance(message, wire.HandoffMessage):
                self._handoff_news(peer, message)
            case _:
                log.warning("unexpected message", peer=peer, message=type(message).__name__)

    def load(self) -> wire.Load:
        self._num_beats += 1
        self._last_beat_s = self.clock.now_s()
        silence_s = self.topology.cluster.silence_s
        replicas = tuple(replica.load(self.draining, silence_s) for replica in self.replicas.values())
        load = wire.Load(sequence=self._num_beats, replicas=replicas)
        self.peers.load(self.name, load)
        return load

    def send(self, peer: NodeName, message: wire.Message) -> bool:
        if peer == self.name:
            asyncio.get_running_loop().call_soon(self.message, peer, self.incarnation, message)
            return True
        return self.links.send(peer, message)

    def _fence(self, peer: NodeName, reason: str) -> None:
        log.warning("fencing peer", peer=peer, reason=reason)
        if peer != self.name:
            self.links.cut(peer, reason)
            return
        # To itself a node has no link that could be cut: what a cut would do to handoffs, and the hello that follows.
        self.peers.down(peer)
        self._end_handoffs(peer, self.incarnation, reason)
        self.peers.up(peer, self.incarnation)
        self.send(peer, self._announcement())

    def _end_handoffs(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None:
        """All that is on the way to or from a peer, whose keys are closed by it."""
        for decode in self._decode.values():
            decode.peer_down(peer, incarnation, reason)
        for prefill in self._prefill.values():
            prefill.peer_down(peer, incarnation, reason)

    def end_all(self, error: PddError) -> None:
        """Every request here ends now; whoever waits for one is told why."""
        for decode in self._decode.values():
            decode.failed(error)
        for prefill in self._prefill.values():
            prefill.failed(error)

    # Who fits whom.

    def _announcement(self) -> wire.Announce:
        return wire.Announce(replicas=tuple(it.info() for it in self.replicas.values() if it.failure is None))

    def announce_to_all(self) -> None:
        """Tells every peer which replicas there are."""
        for peer in list(self.peers):
            self.send(peer.node, self._announcement())

    def _pair(self, peer: Peer) -> None:
        """Pairs each of its replicas with each of ours that it can work with. Called whenever either side has news."""
        for replica in self.replicas.values():
            if replica.role is Role.PREFILL:
                replica.messenger.keep(peer.incarnation, peer.replicas.keys())
        for info in peer.replicas.values():
            for replica in self.replicas.values():
                if {replica.role.value, info.role} != {Role.PREFILL.value, Role.DECODE.value}:
                    continue
                if reason := _misfit(replica.info(), info):
                    peer.refused[info.name] = reason
                    log.error("replicas do not fit", ours=replica.name, theirs=info.name, reason=reason)
                elif replica.role is Role.DECODE:
                    try:
                        self._grant(peer, replica)
                    except FabricError as error:  # theirs is refused until the next announcement; the link stays
                        peer.refused[info.name] = f"{replica.name} cannot grant it memory: {error}"
                        log.error("no grant", ours=replica.name, theirs=info.name, error=str(error))
                    else:
                        self.peers.seen_roles.add(info.role)

    def _grant(self, peer: Peer, replica: ReplicaSet) -> None:
        for grant in replica.messenger.grants(peer.incarnation, replica.name):
            self.send(peer.node, grant)

    def _granted(self, peer: Peer, grant: wire.Grant) -> None:
        """A NIC of a decode replica lets us write through it: every prefill replica here that fits connects."""
        info = peer.replicas.get(grant.replica)
        if info is not None and info.name not in peer.refused and grant.rank < info.shape.tp:
            for replica in self.replicas.values():
                if replica.role is Role.PREFILL:
                    replica.messenger.connect(peer.incarnation, grant)

    # Requests.

    def _submitted(self, peer: NodeName, message: wire.Submit) -> None:
        request = message.request
        try:
            side = self._side_for(message)
            side.submit(request, lambda output: self._answer(peer, output), message.reason)
        except PddError as error:
            self.send(peer, wire.Output(output=TokenOutput(request=request.id, error=error_info(error))))
        else:
            # An output that came of it at once is still on its way: to ourselves, too, messages take a turn.
            if request.id in side.records:
                self._frontends[request.id] = peer

    def _side_for(self, message: wire.Submit) -> DecodeSide:
        """Raises PddError when the request cannot be taken."""
        side = self._decode.get(message.replica)
        if side is None or self.replicas[message.replica].failure is not None:
            raise NoPath(f"{message.replica} is not up")
        if self.draining:
            raise NoPath(f"node {self.name} is draining: it takes no new requests")
        if message.request.id in self._frontends:
            raise BadRequest(f"request {message.request.id} is running already", param="id")
        return side

    def _answer(self, peer: NodeName, output: TokenOutput) -> None:
        if output.last:
            self._frontends.pop(output.request, None)
        self.send(peer, wire.Output(output=output))

    def _cancel(self, peer: NodeName, message: wire.Cancel) -> None:
        if self._frontends.get(message.request) != peer:
            return  # it has ended, or is not this peer's to cancel
        for side in self._decode.values():
            if message.stopped:
                side.stop(message.request)
            else:
                side.cancel(message.request, "the client is gone")
        self._frontends.pop(message.request, None)

    def cancel(self, request: RequestId, reason: str) -> None:
        """By an operator: on whichever side it is here."""
        for side in self._decode.values():
            side.cancel(request, reason)
        for prefill in self._prefill.values():
            prefill.cancel(request, reason)

    def _handoff_news(self, peer: NodeName, message: wire.HandoffMessage) -> None:
        if not any(side.message(peer, message) for side in self._decode.values()):
            self.metrics.stale_messages.labels(type(message).__name__).inc()

    def _prefill_cancelled(self, peer: NodeName, message: wire.CancelPrefill) -> None:
        if not any(side.cancelled(peer, message) for side in self._prefill.values()):
            # All was sent (the decoder will count it), or it was stopped or rejected (the decoder was told).
            self.metrics.stale_messages.labels("CancelPrefill").inc()

    def _prefill_asked(self, peer: NodeName, incarnation: Incarnation, ticket: wire.PrefillRequest) -> None:
        side = self._prefill.get(ticket.source_replica)
        reason = ""
        if side is None or self.replicas[ticket.source_replica].failure is not None:
            reason = f"{ticket.source_replica} is not up on node {self.name}"
        elif self.draining:
            reason = f"node {self.name} is draining"
        elif ticket.target_incarnation != incarnation:
            reason = f"the ticket is of incarnation {ticket.target_incarnation}, the link of {incarnation}"
        if reason or side is None:
            rejected = wire.PrefillRejected(
                request=ticket.request, immediate=ticket.immediates[0], code="not_up", reason=reason
            )
            self.send(peer, rejected)
            return
        side.receive(peer, incarnation, ticket)


def _misfit(ours: wire.ReplicaInfo, theirs: wire.ReplicaInfo) -> str:
    """Why two replicas cannot hand over to each other, each field with both values; empty when they can."""
    differing = list(incompatibilities(ours.shape, theirs.shape))
    if ours.model_digest != theirs.model_digest:
        differing.append(f"model digest {ours.model_digest} here, {theirs.model_digest} there")
    ours_provider, theirs_provider = (it.ranks[0].fabric_provider if it.ranks else "none" for it in (ours, theirs))
    if ours_provider != theirs_provider:
        differing.append(f"fabric provider {ours_provider} here, {theirs_provider} there")
    return "; ".join(differing)
