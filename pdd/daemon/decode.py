"""The decode side: a request from its arrival at a decode (or colocated) replica to its last token.

Allocates pages, has the prompt prefilled elsewhere or here, waits for the count, and decodes. Orders of the machine
(lifecycle/table.py, DECODE) are carried out here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdd.base.errors import BadRequest, Cancelled, DeadlineExceeded, HandoffFailed, NoPath, PddError, QueueFull
from pdd.base.ids import Immediate, Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.balance import choose_prefiller
from pdd.daemon.records import Record
from pdd.daemon.replica import Replica
from pdd.daemon.side import Control, Side
from pdd.engine.plan import Failed, Outcome, Preempted, StepPlan, TokenSampled
from pdd.lifecycle import events as e
from pdd.lifecycle.events import Effect
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.request import FinishReason, GenerateRequest, TokenOutput
from pdd.lifecycle.table import DECODE, DecodeState
from pdd.memory.pool import Allocation
from pdd.topology.model import Handoff as HandoffPolicy
from pdd.topology.model import OnHandoffFailure, Role
from pdd.transfer import messenger as transfer
from pdd.wire import messages as wire

Sink = Callable[[TokenOutput], None]
"""Where a request's outputs go; called until one is `last`."""

_PREFILL_ROLES = frozenset({Role.PREFILL.value})
_IN_FLIGHT = (DecodeState.PREFILLING, DecodeState.TRANSFERRING)


class Handoff(msgspec.Struct):
    """One attempt to have a prompt prefilled elsewhere."""

    node: NodeName
    incarnation: Incarnation
    prefiller: ReplicaName
    immediate: Immediate
    stopping: bool = False
    """The prefiller knows that it is over (it said so, or it is gone): no cancel needs to be sent."""


class DecodeRequest(Record):
    def __init__(self, machine: Machine, replica: ReplicaName, request: GenerateRequest, sink: Sink) -> None:
        super().__init__(machine, "decode", replica, request.prompt)
        self.request = request
        self.sink = sink
        self.allocation = Allocation([], 0)
        self.num_computed = 0
        """Prompt tokens whose KV is in our pages: cached ones, then all but the last once the handoff arrived."""
        self.handoff: Handoff | None = None
        self.attempts = 0
        self.failure = ""
        """Why the latest handoff failed."""
        self.deadline: asyncio.TimerHandle | None = None
        self.lease: asyncio.TimerHandle | None = None


class DecodeSide(Side[DecodeRequest]):
    """All requests that one local replica decodes."""

    def __init__(self, control: Control, replica: Replica, policy: HandoffPolicy, timeout_s: float) -> None:
        super().__init__(control)
        self._replica = replica
        self._policy = policy
        self._timeout_s = timeout_s

    # What frontends and operators ask.

    def submit(self, request: GenerateRequest, sink: Sink) -> None:
        """Takes a request in. Raises BadRequest or QueueFull when it cannot be served; then nothing is kept."""
        if request.id in self.records:
            raise BadRequest(f"request {request.id} is running already", param="id")
        self._replica.admission.enqueue(request.id, request.prompt, len(request.prompt))
        now_s = self.control.clock.now_s()
        record = DecodeRequest(Machine(DECODE, request.id, now_s, "submitted"), self._replica.name, request, sink)
        timeout_s = request.timeout_s or self._timeout_s
        record.deadline = asyncio.get_running_loop().call_later(timeout_s, self._deadline_passed, record, timeout_s)
        self.control.metrics.prompt_tokens.inc(len(request.prompt))
        self.control.metrics.request_prompt_tokens.observe(len(request.prompt))
        self.begin(record)

    def cancel(self, request: RequestId, reason: str) -> None:
        """Unknown requests are ignored: they have ended."""
        if record := self.records.get(request):
            self.feed(record, e.CancelAsked(reason))

    def stop(self, request: RequestId) -> None:
        """The frontend found a stop string: success."""
        record = self.records.get(request)
        if record is not None and record.machine.allows(e.Finished):
            self.feed(record, e.Finished("a stop string"))

    def _deadline_passed(self, record: DecodeRequest, timeout_s: float) -> None:
        state = record.machine.state
        error = DeadlineExceeded(f"the request did not finish within {timeout_s:g} s; it was {state}")
        if not record.machine.ending:
            self.feed(record, e.broken(error))

    # Orders.

    def perform(self, effect: Effect, record: DecodeRequest) -> None:
        match effect:
            case Effect.ALLOCATE:
                self.admit()
            case Effect.ROUTE:
                self._route(record)
            case Effect.STOP_HANDOFF:
                self._stop_handoff(record)
            case Effect.ENQUEUE:
                self._enqueue(record)
            case Effect.TELL:
                self._tell(record)
            case Effect.RELEASE:
                self._release(record)
            case _:
                raise AssertionError(effect)

    def _tell(self, record: DecodeRequest) -> None:
        error = record.machine.error or e.error_info(Cancelled(record.machine.story[-1].reason))
        record.sink(TokenOutput(request=record.id, error=error))
        if record.machine.state is DecodeState.DRAINING:
            self._replica.pool.quarantine(record.id)  # nobody wants the pages, but a peer may still write into them

    def admit(self) -> None:
        """Gives pages to those that wait, as far as there are any."""
        for admitted in self._replica.admit():
            record, allocation = self.records[admitted.request], admitted.allocation
            record.allocation = allocation
            record.num_pages = len(allocation.pages)
            record.num_cached_tokens = record.num_computed = allocation.num_cached_tokens
            what = f"{len(allocation.pages)} pages, {allocation.num_cached_tokens} tokens cached"
            self.feed(record, e.PagesAllocated(what))

    def _route(self, record: DecodeRequest) -> None:
        uncached = len(record.prompt) - 1 - record.num_computed
        if self._replica.role is Role.COLOCATED:
            self._prefill_here(record, "colocated", "colocated replica")
        elif uncached <= self._policy.local_prefill_tokens:
            self._prefill_here(record, "short", f"only {uncached} tokens to prefill")
        elif record.attempts > self._policy.retries:
            self._give_up(record, f"{record.attempts} handoffs failed, the last: {record.failure}")
        else:
            self._hand_off(record)

    def _hand_off(self, record: DecodeRequest) -> None:
        candidates = self.control.peers.candidates(_PREFILL_ROLES)
        others = [it for it in candidates if record.handoff is None or it.name != record.handoff.prefiller]
        choice = choose_prefiller(others or candidates, record.prompt)
        peer = self.control.peers.owner(choice.name) if choice else None
        if choice is None or peer is None:
            self._give_up(record, "no prefiller is reachable")
            return
        start = record.allocation.num_cached_tokens
        first_page = start // self._replica.layout.page_tokens
        end_page = self._replica.layout.num_pages_for(len(record.prompt) - 1)
        pages = record.allocation.pages[first_page:end_page]
        messenger = self._replica.messenger
        try:
            immediate = messenger.arm(record.id, peer.incarnation, len(pages))
        except PddError as error:
            self._give_up(record, f"the handoff could not be armed: {error}")
            return
        record.handoff = Handoff(peer.node, peer.incarnation, choice.name, immediate)
        record.peer = choice.name
        record.attempts += 1
        ticket = wire.PrefillRequest(
            request=record.id,
            source_replica=choice.name,
            target_replica=self._replica.name,
            target_incarnation=self.control.incarnation,
            layout_digest=self._replica.layout.digest(),
            prompt=record.prompt,
            start_token=start,
            target_pages=tuple(pages),
            immediate=immediate,
            lease_s=self._policy.lease_s,
        )
        lease_s = self._policy.lease_s
        record.lease = asyncio.get_running_loop().call_later(lease_s, self._lease_over, record, immediate)
        self.feed(record, e.TicketSent(f"to {choice.name}: {choice.reason}; {len(pages)} pages"))
        if not self.control.send(peer.node, ticket):
            self._handoff_over(record, "the link went down")
            messenger.rejected(record.id, immediate)
            self._replica.poll()

    def _prefill_here(self, record: DecodeRequest, why: str, reason: str) -> None:
        self.control.metrics.prefill_decisions.labels("decoder", why).inc()
        self.feed(record, e.LocalChosen(reason))

    def _give_up(self, record: DecodeRequest, reason: str) -> None:
        if self._policy.on_failure is OnHandoffFailure.RECOMPUTE:
            self._prefill_here(record, "recompute", f"recompute here: {reason}")
        else:
            self.feed(record, e.broken(HandoffFailed(reason) if record.attempts else NoPath(reason)))

    def _stop_handoff(self, record: DecodeRequest) -> None:
        handoff = record.handoff
        assert handoff is not None
        if not handoff.stopping:
            handoff.stopping = True
            self.control.send(
                handoff.node, wire.CancelPrefill(request=record.id, immediate=handoff.immediate)
            )  # when the link is down, link_down fences the peer, and that drains too

    def _enqueue(self, record: DecodeRequest) -> None:
        self._replica.schedule(
            record.request.prompt, record.id, record.request.sampling, record.allocation, record.num_computed
        )

    def _release(self, record: DecodeRequest) -> None:
        self._end_lease(record)
        if record.deadline is not None:
            record.deadline.cancel()
        self._replica.retire(record.id)

    # What the handoff brings.

    def _handoff_over(self, record: DecodeRequest, reason: str) -> None:
        """The prefiller will post nothing more, and knows it."""
        assert record.handoff is not None
        record.handoff.stopping = True
        self._handoff_failed(record, reason)

    def _handoff_failed(self, record: DecodeRequest, reason: str) -> None:
        record.failure = reason
        self.control.metrics.handoffs.labels("failed").inc()
        self.feed(record, e.HandoffFailed(reason))

    def _lease_over(self, record: DecodeRequest, immediate: Immediate) -> None:
        """First the handoff ends; when even the drain takes a lease, the prefiller is fenced."""
        handoff = record.handoff
        if handoff is None or handoff.immediate != immediate or record.machine.terminal:
            return
        lease_s = self._policy.lease_s
        record.lease = asyncio.get_running_loop().call_later(lease_s, self._lease_over, record, immediate)
        if record.machine.state in _IN_FLIGHT:
            self._handoff_failed(record, f"the pages did not arrive within {lease_s:g} s")
        elif record.machine.state is DecodeState.DRAINING:
            self.control.fence(handoff.node, f"it did not confirm the end of {record.id} within {lease_s:g} s")

    def peer_down(self, node: NodeName, incarnation: Incarnation, reason: str) -> None:
        """Its key is closed: what it had not delivered fails, and nothing of it can arrive any more."""
        for record in list(self.records.values()):
            handoff = record.handoff
            if handoff is not None and handoff.incarnation == incarnation and record.machine.allows(e.HandoffFailed):
                self._handoff_over(record, f"link to {node} lost: {reason}")
        if self._replica.role is Role.DECODE:
            self._shut_out(incarnation)

    def _shut_out(self, incarnation: Incarnation) -> None:
        """Closes the peer's memory key. On a provider where that stops nothing, only time makes the pages safe."""
        messenger = self._replica.messenger
        messenger.revoke(incarnation)
        if not messenger.info.fences:
            for record in self.records.values():
                handoff = record.handoff
                if handoff is not None and handoff.incarnation == incarnation:
                    asyncio.get_running_loop().call_later(self._policy.lease_s, self._expire, record.id)
        self._replica.poll()

    def _expire(self, request: RequestId) -> None:
        self._replica.messenger.expire(request)
        self._replica.poll()

    def message(self, node: NodeName, message: wire.HandoffMessage) -> bool:
        """News of a handoff. False when it names another one than the present: it is late and changes nothing."""
        record = self.records.get(message.request)
        handoff = record.handoff if record else None
        if record is None or handoff is None or handoff.immediate != message.immediate or handoff.node != node:
            return False
        match message:
            case wire.PrefillAccepted():
                self.feed(record, e.PrefillerAccepted(f"{node} took it in"))
            case wire.PrefillEnded():
                self._prefill_ended(record, message)
            case wire.PrefillRejected():
                self._handoff_over(record, f"{handoff.prefiller} rejected it: {message.reason}")
                self._replica.messenger.rejected(record.id, handoff.immediate)
            case wire.PrefillStopped():
                if record.machine.state in _IN_FLIGHT:
                    self._handoff_over(record, f"{handoff.prefiller} stopped: {message.reason}")
                self._replica.messenger.stopped(record.id, handoff.immediate, message.num_pieces)
        self._replica.poll()
        return True

    def _prefill_ended(self, record: DecodeRequest, message: wire.PrefillEnded) -> None:
        if record.machine.state is DecodeState.PREFILLING:
            arrived, expected = self._replica.messenger.arrived(record.id)
            record.transfer.landed_share = arrived / expected
        else:
            record.transfer.landed_share = 1.0
        record.transfer.prefill_done_s = self.control.clock.now_s()
        what = f"computed in {message.compute_s * 1e3:.0f} ms, {message.num_cached_tokens} tokens cached there"
        self.feed(record, e.PrefillDone(what))

    def transferred(self, event: transfer.TransferEvent) -> None:
        if isinstance(event, transfer.Stray):
            self.control.metrics.stray_writes.inc(event.num_pieces)
            return
        if not isinstance(event, transfer.Arrived | transfer.Drained):
            return
        record = self.records.get(event.request)
        if record is None or record.handoff is None or record.handoff.immediate != event.immediate:
            return  # of a handoff whose request has ended here
        if isinstance(event, transfer.Arrived):
            self._arrived(record, event)
        else:
            self.control.metrics.handoffs.labels("fenced" if event.fenced else "drained").inc()
            self.feed(record, e.Drained("the peer's key is closed" if event.fenced else "all posted writes counted"))

    def _arrived(self, record: DecodeRequest, event: transfer.Arrived) -> None:
        record.num_computed = len(record.prompt) - 1
        moved = record.transfer
        moved.num_pieces, moved.num_bytes = event.num_pieces, event.num_bytes
        moved.first_s, moved.last_s = event.first_s, event.last_s
        metrics = self.control.metrics
        metrics.handoffs.labels("arrived").inc()
        metrics.prefill_decisions.labels("prefiller", "handoff").inc()
        metrics.handoff_pages.labels("in").inc(event.num_pieces)
        metrics.handoff_bytes.labels("in").inc(event.num_bytes)
        if moved.prefill_done_s is not None:
            metrics.ready_after_prefill.observe(self.control.clock.now_s() - moved.prefill_done_s)
        self._end_lease(record)
        self._replica.messenger.forget(record.id)
        self.feed(record, e.Arrived(f"{event.num_pieces} pages, {event.num_bytes} bytes"))

    def _end_lease(self, record: DecodeRequest) -> None:
        if record.lease is not None:
            record.lease.cancel()
            record.lease = None

    # What the replica's steps bring.

    def planned(self, plan: StepPlan) -> None:
        """Before the step runs: sequences that are in one for the first time are decoding."""
        for request in plan.started:
            record = self.records.get(request)
            if record is not None and record.machine.state is DecodeState.READY:
                self.feed(record, e.Scheduled(f"step {plan.step.number}"))

    def computed(self, plan: StepPlan, seconds: float) -> None:
        """A step's time is nobody's in particular here: many sequences share it."""

    def outcome(self, outcome: Outcome) -> None:
        record = self.records.get(outcome.request)
        if record is None:
            return
        match outcome:
            case TokenSampled():
                self._sampled(record, outcome)
            case Preempted():
                self.control.metrics.preemptions.inc()
                self.feed(record, e.Preempted("its pages went to an older sequence"))
            case Failed():
                self.feed(record, e.broken(QueueFull(outcome.reason, retry_after_s=1.0)))

    def _sampled(self, record: DecodeRequest, sampled: TokenSampled) -> None:
        self._observe_token(record)
        logprobs = () if sampled.logprobs is None else (sampled.logprobs,)
        record.sink(
            TokenOutput(
                request=record.id,
                tokens=(sampled.token,),
                logprobs=logprobs,
                num_cached_tokens=record.num_cached_tokens,
                finish_reason=sampled.finish,
                stop_token=sampled.stop_token,
            )
        )
        if sampled.finish is not None:
            self._observe_end(record)
            text = f"token {sampled.stop_token}" if sampled.finish is FinishReason.STOP else "length"
            self.feed(record, e.Finished(text))

    def _observe_token(self, record: DecodeRequest) -> None:
        metrics, now_s = self.control.metrics, self.control.clock.now_s()
        record.num_output_tokens += 1
        metrics.generation_tokens.inc()
        if record.last_token_s is None:
            record.first_token_s = now_s
            metrics.time_to_first_token.observe(now_s - record.machine.story[0].at_s)
        else:
            metrics.inter_token_latency.observe(now_s - record.last_token_s)
        record.last_token_s = now_s

    def _observe_end(self, record: DecodeRequest) -> None:
        metrics = self.control.metrics
        assert record.first_token_s is not None
        assert record.last_token_s is not None
        metrics.e2e_request_latency.observe(record.last_token_s - record.machine.story[0].at_s)
        metrics.request_generation_tokens.observe(record.num_output_tokens)
        if record.num_output_tokens > 1:
            spent_s = record.last_token_s - record.first_token_s
            metrics.time_per_output_token.observe(spent_s / (record.num_output_tokens - 1))

    def failed(self, error: PddError) -> None:
        """The replica is down: so is everything it served."""
        for record in list(self.records.values()):
            if not record.machine.ending:
                self.feed(record, e.broken(error))
