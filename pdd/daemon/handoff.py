"""A decode replica's handoffs: prompts that are prefilled elsewhere, from the armed count to ready or to the drain.

Who waits for whom: the ticket leaves after the count is armed; the pages are ready when the count is complete; after a
failure they are touched again only when nobody can write into them any more (Drained).
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial

import structlog

from pdd.base.errors import RequestTooLarge
from pdd.base.ids import Immediate, Incarnation, NodeName, PageId
from pdd.daemon.prefillers import Prefillers
from pdd.daemon.records import DecodeRequest, Handoff
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.side import Control, Side
from pdd.lifecycle import events as e
from pdd.lifecycle.table import DecodeState
from pdd.topology.model import Handoff as HandoffPolicy
from pdd.topology.model import Role, Verify
from pdd.transfer import events as transfer
from pdd.transfer.digest import DigestPlan, target_digests
from pdd.wire import messages as wire

log = structlog.get_logger(__name__)

_IN_FLIGHT = (DecodeState.PREFILLING, DecodeState.TRANSFERRING)


class Handoffs:
    """All handoffs into one local replica; `side` holds the requests."""

    def __init__(self, control: Control, replica: ReplicaSet, policy: HandoffPolicy, side: Side[DecodeRequest]) -> None:
        self._control = control
        self._replica = replica
        self._policy = policy
        self._side = side
        self._prefillers = Prefillers(control, replica.name, policy)
        self._next_seed = secrets.randbits(32)
        """One after the other, so that equal source ranks take turns."""

    def begin(self, record: DecodeRequest) -> None:
        """Sends a ticket to the best prefiller. Raises NoPath when there is none, QueueFull or FabricError when no
        count can be armed."""
        choice, peer = self._prefillers.choose(record)
        pages = self._lacking_pages(record)
        start, num_tokens = record.num_cached_tokens, len(record.prompt) - 1
        source = peer.replicas[choice.name].shape
        seed = self._next_seed
        self._next_seed = (seed + 1) % 2**32
        immediates = self._replica.messenger.arm(record.id, peer.incarnation, source, start, num_tokens)
        record.handoff = Handoff(peer.node, peer.incarnation, choice.name, immediates[0])
        if self._policy.verify is Verify.PAGES:
            record.handoff.plan = DigestPlan(
                source=source, target=self._replica.shape, seed=seed, start_token=start, num_tokens=num_tokens
            )
        record.peer = choice.name
        record.attempts += 1
        self._prefillers.asked(record, choice.name)
        record.retry_after_s = None
        lease_s = self._policy.lease_s
        record.lease = asyncio.get_running_loop().call_later(lease_s, self._lease_over, record, immediates[0])
        self._side.feed(record, e.TicketSent(f"to {choice.name}: {choice.reason}; {len(pages)} pages, seed {seed}"))
        unsent = self._send(peer.node, self._ticket(record, pages, immediates, seed))
        if unsent:
            # Like TicketSent these wait for the present event to end, and follow it in this order.
            record.handoff.stopping, record.failure = True, unsent
            self._control.metrics.handoffs.labels("failed").inc()
            self._side.feed(record, e.HandoffFailed(unsent))
            self._replica.messenger.rejected(record.id, immediates[0])
            self._replica.poll()

    def _send(self, node: NodeName, ticket: wire.PrefillRequest) -> str:
        """Why the ticket could not leave; empty when it has."""
        try:
            return "" if self._control.send(node, ticket) else f"the link to {node} just went down"
        except RequestTooLarge as error:
            return str(error)

    def _lacking_pages(self, record: DecodeRequest) -> list[PageId]:
        """Those of its pages that the prefiller is to fill."""
        layout = self._replica.layout
        first = record.num_cached_tokens // layout.page_tokens
        return record.allocation.pages[first : layout.num_pages_for(len(record.prompt) - 1)]

    def _ticket(
        self, record: DecodeRequest, pages: list[PageId], immediates: tuple[Immediate, ...], seed: int
    ) -> wire.PrefillRequest:
        assert record.handoff is not None
        return wire.PrefillRequest(
            request=record.id,
            source_replica=record.handoff.prefiller,
            target_replica=self._replica.name,
            target_incarnation=self._control.incarnation,
            shape_digest=self._replica.shape.digest(),
            seed=seed,
            prompt=record.prompt,
            start_token=record.num_cached_tokens,
            target_pages=tuple(pages),
            immediates=immediates,
            lease_s=self._policy.lease_s,
            verify=record.handoff.plan is not None,
        )

    def stop(self, record: DecodeRequest) -> None:
        """Asks the prefiller to post nothing more. When the link is down, link_down fences it, which drains too."""
        handoff = record.handoff
        assert handoff is not None
        if handoff.arrived is not None:
            self._discard(record)
        elif not handoff.stopping:
            handoff.stopping = True
            self._control.send(handoff.node, wire.CancelPrefill(request=record.id, immediate=handoff.immediate))

    def _over(self, record: DecodeRequest, reason: str) -> None:
        """The prefiller will post nothing more, and knows it."""
        assert record.handoff is not None
        record.handoff.stopping = True
        self._failed(record, reason)

    def _failed(self, record: DecodeRequest, reason: str) -> None:
        if not record.machine.allows(e.HandoffFailed):
            return  # it has arrived: whatever the prefiller says now is late
        if record.machine.state in _IN_FLIGHT:
            record.failure = reason
            self._control.metrics.handoffs.labels("failed").inc()
        self._side.feed(record, e.HandoffFailed(reason))

    def _lease_over(self, record: DecodeRequest, immediate: Immediate) -> None:
        """First the handoff ends; when even the drain takes a lease, the prefiller is fenced."""
        handoff = record.handoff
        if handoff is None or handoff.immediate != immediate or record.machine.terminal:
            return
        lease_s = self._policy.lease_s
        record.lease = asyncio.get_running_loop().call_later(lease_s, self._lease_over, record, immediate)
        if record.machine.state in _IN_FLIGHT:
            reason = f"the pages did not arrive within {lease_s:g} s"
            if record.machine.state is DecodeState.TRANSFERRING:
                self._prefillers.lost(handoff, reason)
            self._failed(record, reason)
        elif record.machine.state is DecodeState.DRAINING and not self._replica.messenger.arrived(record.id)[1]:
            log.error("a drain waits for nothing", request=record.id, story=record.machine.tell())
            self._side.feed(record, e.Drained("no piece is expected for it"))
        elif record.machine.state is DecodeState.DRAINING and handoff.stopped:
            self._writes_lost(handoff, f"pieces that it posted did not arrive within {lease_s:g} s")
        elif record.machine.state is DecodeState.DRAINING:
            self._control.fence(handoff.node, f"it did not confirm the end of {record.id} within {lease_s:g} s")

    def peer_down(self, node: NodeName, incarnation: Incarnation, reason: str) -> None:
        """Its key is closed: what it had not delivered fails, and nothing of it can arrive any more."""
        for record in self._served_by(incarnation):
            self._over(record, f"link to {node} lost: {reason}")
        if self._replica.role is Role.DECODE:
            self._shut_out(incarnation)

    def _writes_lost(self, handoff: Handoff, reason: str) -> None:
        """Its prefiller lives, and what it wrote gets lost: the peer's keys are closed, so that nothing need be waited
        for, and it gets new ones over the same link. What else is under way with the old ones ends, too."""
        reason = f"writes of {handoff.prefiller} failed: {reason}"
        log.warning("closing a peer's keys", peer=handoff.node, replica=self._replica.name, reason=reason)
        self._prefillers.lost(handoff, reason)
        for record in self._served_by(handoff.incarnation):
            self._over(record, reason)
        self._close_keys(handoff.incarnation)
        self._control.pair(handoff.node)  # before the next poll: what that drains may ask the same prefiller again
        self._replica.poll()

    def _served_by(self, incarnation: Incarnation) -> list[DecodeRequest]:
        """Those whose handoffs from that peer are not over."""
        return [
            it
            for it in self._side.records.values()
            if it.handoff is not None and it.handoff.incarnation == incarnation and it.machine.allows(e.HandoffFailed)
        ]

    def _shut_out(self, incarnation: Incarnation) -> None:
        self._close_keys(incarnation)
        self._replica.poll()

    def _close_keys(self, incarnation: Incarnation) -> None:
        """Of a peer. On a provider where that stops nothing, only time makes the pages safe."""
        messenger = self._replica.messenger
        messenger.revoke(incarnation)
        if not messenger.fences:
            for record in list(self._side.records.values()):
                handoff = record.handoff
                if handoff is not None and handoff.incarnation == incarnation and not handoff.shut_out:
                    self._wait_for_late_writes(record, handoff)

    def _wait_for_late_writes(self, record: DecodeRequest, handoff: Handoff) -> None:
        """In the place of its lease: nobody is left to be asked or fenced."""
        if record.machine.state is not DecodeState.DRAINING:
            return  # an earlier handoff of a request that has got on
        handoff.shut_out = True
        if record.lease is not None:
            record.lease.cancel()
        lease_s, provider = self._policy.lease_s, self._replica.provider
        record.lease = asyncio.get_running_loop().call_later(lease_s, self._expire, record, handoff)
        reason = f"{provider} does not fence: late writes may come for {lease_s:g} s, so long the pages are nobody's"
        self._side.feed(record, e.HandoffFailed(reason))

    def _expire(self, record: DecodeRequest, handoff: Handoff) -> None:
        # Else late writes have completed that one, and the replica itself may be gone.
        if record.handoff is handoff and not record.machine.terminal:
            self._replica.messenger.expire(record.id)
            self._replica.poll()

    def message(self, node: NodeName, message: wire.HandoffMessage) -> bool:
        """News of a handoff. False when it names another one than the present: it is late and changes nothing."""
        self._replica.poll()  # pages that are all there already are used, whatever the prefiller says
        record = self._side.records.get(message.request)
        handoff = record.handoff if record else None
        if record is None or handoff is None or (handoff.immediate, handoff.node) != (message.immediate, node):
            return False
        match message:
            case wire.PrefillAccepted():
                if record.machine.allows(e.PrefillerAccepted) and not handoff.accepted:
                    handoff.accepted = True
                    self._side.feed(record, e.PrefillerAccepted(f"{node} took it in"))
            case wire.PrefillEnded():
                if not handoff.ended:
                    handoff.ended = True
                    self._prefill_ended(record, message)
            case wire.PrefillDigests():
                handoff.their_digests = message.digests
                self._compare(record, handoff)
            case wire.PrefillRejected():
                if record.machine.state in _IN_FLIGHT:
                    record.retry_after_s = message.retry_after_s
                    self._over(record, f"{handoff.prefiller} rejected it: {message.reason}")
                self._replica.messenger.rejected(record.id, handoff.immediate)
            case wire.PrefillStopped():
                self._prefill_stopped(record, handoff, message)
        self._replica.poll()
        return True

    def _prefill_stopped(self, record: DecodeRequest, handoff: Handoff, message: wire.PrefillStopped) -> None:
        if handoff.stopped:
            return
        handoff.stopped = True
        if record.machine.state in _IN_FLIGHT:
            self._over(record, f"{handoff.prefiller} stopped: {message.reason}")
        drains = record.machine.state is DecodeState.DRAINING and not handoff.shut_out
        self._replica.messenger.stopped(record.id, handoff.immediate, message.num_pieces)
        if message.failed and drains:
            self._writes_lost(handoff, message.reason)

    def _prefill_ended(self, record: DecodeRequest, message: wire.PrefillEnded) -> None:
        if not record.machine.allows(e.PrefillDone):
            return  # the handoff failed and the request goes another way
        if record.machine.state is DecodeState.PREFILLING:
            arrived, expected = self._replica.messenger.arrived(record.id)
            record.transfer.landed_share = arrived / expected
        else:
            record.transfer.landed_share = 1.0
        record.transfer.prefill_done_s = self._control.clock.now_s()
        what = f"computed in {message.compute_s * 1e3:.0f} ms, {message.num_cached_tokens} tokens cached there"
        self._side.feed(record, e.PrefillDone(what))

    def transferred(self, event: transfer.TransferEvent) -> None:
        if isinstance(event, transfer.Stray):
            self._control.metrics.stray_writes.inc(event.num_pieces)
            return
        if not isinstance(event, transfer.Arrived | transfer.Drained):
            return
        record = self._side.records.get(event.request)
        if record is None or record.handoff is None or record.handoff.immediate != event.immediate:
            return  # of a handoff whose request has ended here
        if isinstance(event, transfer.Arrived):
            if record.handoff.plan is None:
                self._arrived(record, event)
            else:
                self._verify(record, record.handoff, record.handoff.plan, event)
        else:
            if record.machine.state in _IN_FLIGHT:  # our own port broke: nobody had to fail before
                self._failed(record, "a fabric port of this replica failed")
            self._control.metrics.handoffs.labels("fenced" if event.fenced else "drained").inc()
            self._side.feed(record, e.Drained(self._why_safe(event)))

    def _why_safe(self, event: transfer.Drained) -> str:
        if not event.fenced:
            return "all posted writes counted"
        if self._replica.messenger.fences:
            return "the peer's key is closed"
        return "the peer's key is closed, and the time of its late writes is over"

    def _verify(self, record: DecodeRequest, handoff: Handoff, plan: DigestPlan, event: transfer.Arrived) -> None:
        """All pieces are in place: are they those that were sent?"""
        if record.machine.state not in _IN_FLIGHT:
            self._discard(record)
            return
        handoff.arrived = event
        pages = self._lacking_pages(record)
        self._replica.hash_pages(partial(target_digests, plan, pages), partial(self._hashed, record, handoff))

    def _hashed(self, record: DecodeRequest, handoff: Handoff, digests: tuple[int, ...]) -> None:
        handoff.our_digests = digests
        self._compare(record, handoff)

    def _compare(self, record: DecodeRequest, handoff: Handoff) -> None:
        """Once both sides' digests are there, and if they are still of interest."""
        ours, theirs = handoff.our_digests, handoff.their_digests
        if record.handoff is not handoff or record.machine.state not in _IN_FLIGHT or ours is None or theirs is None:
            return
        assert handoff.arrived is not None  # else there were no digests of ours
        if ours == theirs:
            self._arrived(record, handoff.arrived)
            return
        self._control.metrics.handoffs.labels("corrupt").inc()
        log.error("corrupt pages", request=record.id, prefiller=handoff.prefiller)
        self._over(record, f"the pages that arrived differ from those that {handoff.prefiller} sent")

    def _discard(self, record: DecodeRequest) -> None:
        """All pieces are in place and none is wanted: nothing more can come."""
        self._replica.messenger.forget(record.id)
        self._control.metrics.handoffs.labels("drained").inc()
        self._side.feed(record, e.Drained("all pieces counted, and not used"))

    def _arrived(self, record: DecodeRequest, event: transfer.Arrived) -> None:
        record.num_computed = len(record.prompt) - 1
        moved = record.transfer
        moved.num_pieces, moved.num_bytes = event.num_pieces, event.num_bytes
        moved.first_s, moved.last_s = event.first_s, event.last_s
        metrics = self._control.metrics
        metrics.handoffs.labels("arrived").inc()
        metrics.prefill_decisions.labels("prefiller", "handoff").inc()
        metrics.handoff_pieces.labels("in").inc(event.num_pieces)
        metrics.handoff_bytes.labels("in").inc(event.num_bytes)
        if moved.prefill_done_s is not None:
            metrics.ready_after_prefill.observe(self._control.clock.now_s() - moved.prefill_done_s)
        if record.handoff is not None:
            self._prefillers.worked(record.handoff)
        self.end(record)
        self._replica.messenger.forget(record.id)
        self._side.feed(record, e.Arrived(f"{event.num_pieces} pieces, {event.num_bytes} bytes"))

    def end(self, record: DecodeRequest) -> None:
        """Nothing of the handoff is waited for any more."""
        if record.handoff is not None:
            self._prefillers.ended(record, record.handoff)
        if record.lease is not None:
            record.lease.cancel()
            record.lease = None
