"""The prefill side: a ticket from its arrival to the last of its writes.

Takes source pages, has the prompt computed chunk by chunk, and announces each chunk to the messenger before it runs, so
that the C library sends every layer as soon as the executor has passed it. The machine: lifecycle/table.py, PREFILL.
"""

from __future__ import annotations

import asyncio
from functools import partial

from pdd.base.errors import BadTicket, PddError, QueueFull
from pdd.base.ids import Incarnation, NodeName, RequestId
from pdd.daemon.records import PrefillJob
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.side import Control, Side
from pdd.engine.plan import Outcome, PrefillComputed, StepPlan
from pdd.lifecycle import events as e
from pdd.lifecycle.events import Effect
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.table import PREFILL, PrefillState
from pdd.transfer import events as transfer
from pdd.transfer.digest import DigestPlan, source_digests
from pdd.wire import messages as wire


class PrefillSide(Side[PrefillJob]):
    """All tickets that one local replica prefills."""

    def __init__(self, control: Control, replica: ReplicaSet) -> None:
        super().__init__(control)
        self._replica = replica
        self._delayed: dict[RequestId, PrefillJob] = {}
        """Those whose request had an earlier ticket, of which a step still runs and uses pages under the same name."""

    def receive(self, node: NodeName, incarnation: Incarnation, ticket: wire.PrefillRequest) -> None:
        now_s = self.control.clock.now_s()
        machine = Machine(PREFILL, ticket.request, now_s, f"ticket from {ticket.target_replica}")
        job = PrefillJob(machine, self._replica.name, ticket, node, incarnation)
        known = self.records.get(ticket.request)
        if known is None:
            self.begin(job)
        elif known.ticket.immediates != ticket.immediates:
            self._reject(job, BadTicket(f"request {ticket.request} is being prefilled already"))
        else:
            # The same ticket again: a rejection would say that nothing was posted, and the first one may have.
            self.control.metrics.stale_messages.labels("PrefillRequest").inc()

    def cancelled(self, node: NodeName, message: wire.CancelPrefill) -> bool:
        """The decoder wants it no more. False when it means another handoff than the present one."""
        job = self.records.get(message.request)
        if job is None or job.ticket.immediates[0] != message.immediate or job.node != node:
            return False
        if job.machine.state is not PrefillState.DRAINING:
            self.feed(job, e.CancelAsked("the decoder cancelled"))
        return True

    def cancel(self, request: RequestId, reason: str) -> None:
        """By an operator. Unknown requests are ignored: they have ended."""
        if job := self.records.get(request):
            self.feed(job, e.CancelAsked(reason))

    def peer_down(self, node: NodeName, incarnation: Incarnation, reason: str) -> None:
        for job in list(self.records.values()):
            if job.incarnation == incarnation:
                self.feed(job, e.CancelAsked(f"link to {node} lost: {reason}"))
        self._replica.messenger.disconnect(incarnation)
        self._replica.poll()

    def _lease_over(self, job: PrefillJob) -> None:
        self.feed(job, e.CancelAsked(f"the lease of {job.ticket.lease_s:g} s is over"))

    # Orders.

    def perform(self, effect: Effect, record: PrefillJob) -> None:
        match effect:
            case Effect.ALLOCATE:
                self._allocate(record)
            case Effect.ENQUEUE:
                self._replica.schedule(record.prompt, record.id, None, record.allocation, record.num_cached_tokens)
            case Effect.STOP_WRITES:
                self._replica.scheduler.remove(record.id)
                record.hashing = False  # nobody will compare
                if record.sent is not None:  # the last write ended before the step's report: nothing is left to stop
                    self._all_sent(record, record.sent)
                else:
                    self._replica.messenger.stop(record.id)
                    self._replica.poll()
            case Effect.CONFIRM_STOP:
                self._confirm_stop(record)
            case Effect.REJECT:
                assert record.rejection is not None  # nothing else rejects
                self._reject(record, record.rejection)
            case Effect.RELEASE:
                self._release(record)
            case _:
                raise AssertionError(effect)

    def _allocate(self, job: PrefillJob) -> None:
        try:
            self._accept(job)
            if self._replica.admission.is_admitted(job.id):
                self._delayed[job.id] = job
            else:
                self._enqueue(job)
        except PddError as error:
            self._refuse(job, error)
            return
        job.lease = asyncio.get_running_loop().call_later(job.ticket.lease_s, self._lease_over, job)
        self.control.send(job.node, wire.PrefillAccepted(request=job.id, immediate=job.ticket.immediates[0]))
        self.admit()

    def _accept(self, job: PrefillJob) -> None:
        """Raises PddError when the ticket does not fit what we know of its sender."""
        self._replica.check_prompt(job.prompt)
        peer = self.control.peers.get(job.node)
        info = peer.replicas.get(job.ticket.target_replica) if peer else None
        if info is None:
            raise BadTicket(f"{job.ticket.target_replica} is no replica of {job.node} that we know")
        self._replica.messenger.accept(job.ticket, job.incarnation, info.shape)

    def _enqueue(self, job: PrefillJob) -> None:
        """Raises PddError where there is no room."""
        self._replica.admission.enqueue(job.id, job.prompt, len(job.prompt) - 1, 0)

    def _refuse(self, job: PrefillJob, error: PddError) -> None:
        job.rejection = error
        self.feed(job, e.Rejected(str(error)))

    def admit(self) -> None:
        for job in [it for it in self._delayed.values() if not self._replica.admission.is_admitted(it.id)]:
            del self._delayed[job.id]
            try:
                self._enqueue(job)
            except PddError as error:
                self._refuse(job, error)
        for admitted in self._replica.admit():
            self.give_pages(self.records[admitted.request], admitted.allocation)

    def _prefill_done(self, job: PrefillJob) -> None:
        news = wire.PrefillEnded(
            request=job.id,
            immediate=job.ticket.immediates[0],
            num_cached_tokens=job.num_cached_tokens,
            compute_s=job.compute_s,
        )
        self.control.send(job.node, news)
        job.transfer.prefill_done_s = self.control.clock.now_s()
        if job.ticket.verify and job.machine.state is PrefillState.PREFILLING:
            self._hash(job)
        self.feed(job, e.PrefillDone(f"computed in {job.compute_s * 1e3:.0f} ms"))
        if job.sent is not None:
            self._all_sent(job, job.sent)

    def _hash(self, job: PrefillJob) -> None:
        """Tells the target what the pages hold, for it to compare. They stay ours until that is known."""
        peer = self.control.peers.get(job.node)
        info = peer.replicas.get(job.ticket.target_replica) if peer else None
        if info is None:
            return  # the decoder has taken the replica back: it is about to cancel
        plan = DigestPlan(
            source=self._replica.shape,
            target=info.shape,
            seed=job.ticket.seed,
            start_token=job.ticket.start_token,
            num_tokens=len(job.prompt) - 1,
        )
        job.hashing = True
        self._replica.hash_pages(partial(source_digests, plan, job.allocation.pages), partial(self._hashed, job))

    def _hashed(self, job: PrefillJob, digests: tuple[int, ...]) -> None:
        if not job.hashing:
            return  # it was stopped meanwhile
        job.hashing = False
        news = wire.PrefillDigests(request=job.id, immediate=job.ticket.immediates[0], digests=digests)
        self.control.send(job.node, news)
        if job.sent is not None:
            self._all_sent(job, job.sent)

    def _confirm_stop(self, job: PrefillJob) -> None:
        stopped = wire.PrefillStopped(
            request=job.id,
            immediate=job.ticket.immediates[0],
            num_pieces=job.num_posted,
            reason=job.machine.story[-1].reason,
            failed=job.writes_failed,
        )
        self.control.send(job.node, stopped)  # when the link is down, the decoder has fenced us

    def _reject(self, job: PrefillJob, error: PddError) -> None:
        rejection = wire.PrefillRejected(
            request=job.id,
            immediate=job.ticket.immediates[0],
            code=error.code,
            reason=str(error),
            retry_after_s=min(error.retry_after_s, 3600.0) if isinstance(error, QueueFull) else None,
        )
        self.control.send(job.node, rejection)

    def _release(self, job: PrefillJob) -> None:
        if job.lease is not None:
            job.lease.cancel()
        self._delayed.pop(job.id, None)
        self._replica.messenger.stop(job.id)
        self._replica.poll()  # a job that had not begun is over with that: the same request may come again at once
        self._replica.retire(job.id)

    # What the replica's steps and writes bring.

    def planned(self, plan: StepPlan) -> None:
        """Before the step runs: every chunk is announced, so that its layers go out as they are computed."""
        for chunk in plan.chunks:
            job = self.records[chunk.request]
            if job.machine.state is PrefillState.ALLOCATED:
                self.feed(job, e.Scheduled(f"step {plan.step.number}"))
            self._replica.messenger.announce(
                chunk.request,
                chunk.start,
                chunk.end,
                last=chunk.is_last,
                pages=chunk.pages,
                counter_base=plan.counter_base if chunk.armed else None,
            )
        self._replica.poll()

    def computed(self, plan: StepPlan, seconds: float) -> None:
        for chunk in plan.chunks:
            job = self.records.get(chunk.request)
            if job is not None and job.id not in self._delayed:
                job.compute_s += seconds

    def outcome(self, outcome: Outcome) -> None:
        job = self.records.get(outcome.request)
        if job is None:
            return
        # Nothing else happens to a prefill: it has all its pages from the start, and nothing is sampled.
        assert isinstance(outcome, PrefillComputed), outcome
        self._prefill_done(job)

    def transferred(self, event: transfer.TransferEvent) -> None:
        if not isinstance(event, transfer.Sent | transfer.Stopped):
            return
        job = self.records.get(event.request)
        if job is None or job.ticket.immediates[0] != event.immediate:
            return  # of a handoff whose request has ended here
        if isinstance(event, transfer.Sent):
            self._all_sent(job, event)
        else:
            job.num_posted, job.writes_failed = event.num_pieces, event.failed
            self.feed(job, e.Stopped(f"{sum(event.num_pieces)} pieces posted: {event.reason}"))

    def _all_sent(self, job: PrefillJob, event: transfer.Sent) -> None:
        if job.machine.state is PrefillState.PREFILLING or job.hashing:
            job.sent = event
            return
        num_pieces = sum(event.num_pieces)
        job.num_posted = event.num_pieces
        job.transfer.num_pieces, job.transfer.num_bytes = num_pieces, event.num_bytes
        self.control.metrics.handoff_pieces.labels("out").inc(num_pieces)
        self.control.metrics.handoff_bytes.labels("out").inc(event.num_bytes)
        self.feed(job, e.Sent(f"{num_pieces} pieces, {event.num_bytes} bytes"))

    def failed(self, error: PddError) -> None:
        for job in list(self.records.values()):
            self.feed(job, e.broken(error))
