"""The decode side: a request from its arrival at a decode (or colocated) replica to its last token.

Allocates pages, has the prompt prefilled elsewhere or here, waits for the count, and decodes. Orders of the machine
(lifecycle/table.py, DECODE) are carried out here.
"""

from __future__ import annotations

import asyncio

from pdd.base.errors import (
    BadRequest,
    Cancelled,
    DeadlineExceeded,
    FabricError,
    HandoffFailed,
    NoPath,
    PddError,
    QueueFull,
)
from pdd.base.ids import Incarnation, NodeName, RequestId
from pdd.daemon.handoff import Handoffs
from pdd.daemon.records import DecodeRequest, Sink
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.side import Control, Side
from pdd.engine.plan import Failed, Outcome, Preempted, StepPlan, TokenSampled
from pdd.lifecycle import events as e
from pdd.lifecycle.events import Effect
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.request import FinishReason, GenerateRequest, TokenOutput
from pdd.lifecycle.table import DECODE, DecodeState
from pdd.topology.model import Handoff as HandoffPolicy
from pdd.topology.model import OnHandoffFailure, Role
from pdd.transfer import events as transfer
from pdd.wire import messages as wire


class DecodeSide(Side[DecodeRequest]):
    """All requests that one local replica decodes."""

    def __init__(self, control: Control, replica: ReplicaSet, policy: HandoffPolicy, timeout_s: float) -> None:
        super().__init__(control)
        self._replica = replica
        self._policy = policy
        self._handoffs = Handoffs(control, replica, policy, self)
        self._timeout_s = timeout_s

    # What frontends and operators ask.

    def submit(self, request: GenerateRequest, sink: Sink, reason: str = "") -> None:
        """Takes a request in. Raises BadRequest or QueueFull when it cannot be served; then nothing is kept."""
        if request.id in self.records:
            raise BadRequest(f"request {request.id} is running already", param="id")
        self._replica.check_prompt(request.prompt)
        request.check()
        max_tokens = request.sampling.max_tokens
        self._replica.admission.enqueue(request.id, request.prompt, len(request.prompt), max_tokens)
        now_s = self.control.clock.now_s()
        record = DecodeRequest(
            Machine(DECODE, request.id, now_s, reason or "submitted"), self._replica.name, request, sink
        )
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
            self._observe_end(record)
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
                self._handoffs.stop(record)
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
            record = self.records[admitted.request]
            record.num_computed = admitted.allocation.num_cached_tokens
            self.give_pages(record, admitted.allocation)

    def _route(self, record: DecodeRequest) -> None:
        uncached = len(record.prompt) - 1 - record.num_computed
        if self._replica.role is Role.COLOCATED:
            self._prefill_here(record, "colocated", "colocated replica")
        elif uncached <= self._policy.local_prefill_tokens:
            self._prefill_here(record, "short", f"only {uncached} tokens to prefill")
        elif record.attempts > self._policy.retries:
            self._give_up(record, _failure(record))
        else:
            try:
                self._handoffs.begin(record)
            except QueueFull as error:
                self._give_up(record, error)
            except (NoPath, FabricError) as error:
                self._give_up(record, HandoffFailed(str(error)) if record.attempts else NoPath(str(error)))

    def _prefill_here(self, record: DecodeRequest, why: str, reason: str) -> None:
        self.control.metrics.prefill_decisions.labels("decoder", why).inc()
        self.feed(record, e.LocalChosen(reason))

    def _give_up(self, record: DecodeRequest, error: PddError) -> None:
        if self._policy.on_failure is OnHandoffFailure.RECOMPUTE:
            self._prefill_here(record, "recompute", f"recompute here: {error}")
        else:
            self.feed(record, e.broken(error))

    def _enqueue(self, record: DecodeRequest) -> None:
        self._replica.schedule(
            record.request.prompt, record.id, record.request.sampling, record.allocation, record.num_computed
        )

    def _release(self, record: DecodeRequest) -> None:
        self._handoffs.end(record)
        if record.deadline is not None:
            record.deadline.cancel()
        self._replica.retire(record.id)

    # What handoffs bring.

    def message(self, node: NodeName, message: wire.HandoffMessage) -> bool:
        """News of a handoff from a prefiller. False when it is late: it changes nothing then."""
        return self._handoffs.message(node, message)

    def peer_down(self, node: NodeName, incarnation: Incarnation, reason: str) -> None:
        self._handoffs.peer_down(node, incarnation, reason)

    def transferred(self, event: transfer.TransferEvent) -> None:
        self._handoffs.transferred(event)

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
        if record.first_token_s is None or record.last_token_s is None:
            return
        self._replica.admission.learn(record.num_output_tokens)
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


def _failure(record: DecodeRequest) -> PddError:
    """Of the latest of its handoffs, when there is to be no other."""
    reason = f"{record.attempts} handoffs failed, the last: {record.failure}"
    return HandoffFailed(reason) if record.retry_after_s is None else QueueFull(reason, record.retry_after_s)
