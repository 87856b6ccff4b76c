"""Admission, scheduler and pool together, with an executor that checks the KV of every position that it reads.

The fake executor stores for each slot of each page all tokens up to it, which is what real KV depends on, and samples
a token that is a function of all tokens so far: a page that was shared, kept or freed wrongly changes what it reads.
"""

from __future__ import annotations

import itertools
import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pdd.base.errors import BadRequest, QueueFull
from pdd.base.ids import PageId, RequestId, SequenceId
from pdd.engine.admission import Admission
from pdd.engine.plan import Preempted, PrefillComputed, Removed, StepPlan, TokenSampled
from pdd.engine.protocol import Row, Sampled, StartSequence, Step
from pdd.engine.scheduler import Scheduler
from pdd.engine.sequence import Sequence
from pdd.lifecycle.request import FinishReason, SamplingParams
from pdd.memory.pool import Allocation, PagePool

NUM_LAYERS = 3
VOCABULARY = 3
STOP_TOKEN = 2


COMMON = [0, 1, 1, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0]
PROMPTS = st.builds(
    lambda common, own: (COMMON[:common] + own) or [0], st.integers(0, 16), st.lists(st.integers(0, 1), max_size=8)
)

SAMPLING = st.builds(
    SamplingParams,
    max_tokens=st.sampled_from([1, 2, 5, 30]),
    min_tokens=st.integers(0, 3),
    stop_token_ids=st.sampled_from([(), (STOP_TOKEN,)]),
)


def next_token(tokens: list[int]) -> int:
    return zlib.crc32(bytes(tokens)) % 7 % VOCABULARY


def answer(prompt: tuple[int, ...], sampling: SamplingParams, max_sequence_tokens: int) -> list[int]:
    """What the model answers, without pages, batches and preemptions."""
    tokens = list(prompt)
    while True:
        tokens.append(next_token(tokens))
        num_output = len(tokens) - len(prompt)
        stops = tokens[-1] in sampling.stop_token_ids and num_output >= sampling.min_tokens
        if stops or num_output == sampling.max_tokens or len(tokens) >= max_sequence_tokens:
            return tokens[len(prompt) :]


class FakeExecutor:
    def __init__(self, pool: PagePool) -> None:
        self.pool = pool
        self.slots: dict[tuple[int, int, int], tuple[int, ...]] = {}
        """(page, its generation, slot) -> all tokens up to the one that is stored there."""
        self.sequences: dict[SequenceId, tuple[StartSequence, list[int], list[int]]] = {}
        self.next_start: dict[SequenceId, int] = {}
        self.counter = 0

    def slot(self, pages: list[int], position: int) -> tuple[int, int, int]:
        page = PageId(pages[position // self.pool.page_tokens])
        return page, self.pool.generation(page), position % self.pool.page_tokens

    def store(self, pages: list[int], tokens: list[int], start: int, end: int) -> None:
        for position in range(start, end):
            slot = self.slot(pages, position)
            assert slot not in self.slots, f"position {position} is computed where KV is in place"
            self.slots[slot] = tuple(tokens[: position + 1])

    def check(self, pages: list[int], tokens: list[int], end: int) -> None:
        for position in range(end):
            found = self.slots.get(self.slot(pages, position))
            assert found == tuple(tokens[: position + 1]), f"wrong KV at position {position}"

    def run(self, step: Step) -> list[Sampled]:
        for sequence in step.release:
            del self.sequences[sequence]
            self.next_start.pop(sequence, None)
        for start in step.start:
            assert start.sequence not in self.sequences
            self.sequences[start.sequence] = start, list(start.pages), start.prompt + start.output
        assert len({row.sequence for row in step.rows}) == len(step.rows)
        self.counter += NUM_LAYERS if step.rows else 0
        for row in step.rows:  # all rows of a layer run together: reads are checked before anything is written
            self.check(self.sequences[row.sequence][1], self.sequences[row.sequence][2], row.start)
        return [sampled for row in step.rows for sampled in self.row(row)]

    def row(self, row: Row) -> list[Sampled]:
        start, pages, tokens = self.sequences[row.sequence]
        assert row.start == self.next_start.get(row.sequence, row.start), "a position is skipped or computed twice"
        end = self.next_start[row.sequence] = row.start + len(row.tokens)
        pages += row.new_pages
        assert row.tokens == tokens[row.start : end]
        assert row.tokens
        self.store(pages, tokens, row.start, end)
        assert row.sample == (start.sampling is not None and end == len(tokens))
        if not row.sample:
            return []
        token = next_token(tokens)
        tokens.append(token)
        return [Sampled(row.sequence, token, None)]


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_pages=st.sampled_from([10, 12, 16, 5]),
        page_tokens=st.sampled_from([2, 3, 4, 1]),
        prefix_cache=st.booleans(),
        chunk_tokens=st.sampled_from([8, 12, 16, 3]),
        prefill_role=st.booleans(),
    )
    def build(
        self,
        num_pages: int,
        page_tokens: int,
        prefix_cache: bool,
        chunk_tokens: int,
        prefill_role: bool,
    ) -> None:
        self.pool = PagePool(num_pages, page_tokens, prefix_cache)
        self.admission = Admission(self.pool, max_sequences=4, max_queue=6)
        self.max_sequence_tokens = num_pages * page_tokens
        self.scheduler = Scheduler(
            self.pool, num_layers=NUM_LAYERS, chunk_tokens=chunk_tokens, max_sequence_tokens=self.max_sequence_tokens
        )
        self.executor = FakeExecutor(self.pool)
        self.prefill_role = prefill_role
        self.ids = itertools.count()
        self.asked: dict[RequestId, tuple[tuple[int, ...], SamplingParams]] = {}
        self.arriving: dict[RequestId, Allocation] = {}
        self.scheduled: dict[RequestId, Sequence] = {}
        self.removed: set[RequestId] = set()
        self.sending: set[RequestId] = set()
        self.output: dict[RequestId, list[int]] = {}
        self.sent: dict[RequestId, int] = {}
        self.plan: StepPlan | None = None
        self.in_quarantine: set[RequestId] = set()
        self.num_steps = 0

    @rule(burst=st.lists(st.tuples(PROMPTS, SAMPLING), min_size=1, max_size=5), hand_off=st.booleans())
    def submit_and_admit(self, burst: list[tuple[list[int], SamplingParams]], hand_off: bool) -> None:
        for prompt, sampling in burst:
            self.submit(prompt, sampling)
        self.admit(hand_off)

    @rule(prompt=PROMPTS, sampling=SAMPLING)
    def submit(self, prompt: list[int], sampling: SamplingParams) -> None:
        request = RequestId(f"r{next(self.ids)}")
        try:
            most = 0 if self.prefill_role else sampling.max_tokens
            self.admission.enqueue(request, tuple(prompt), len(prompt) - self.prefill_role, most)
        except BadRequest:
            assert len(prompt) > self.max_sequence_tokens
        except QueueFull:
            assert self.admission.num_waiting + self.admission.num_admitted == 10
        else:
            self.asked[request] = tuple(prompt), sampling
            self.output[request] = []

    @rule(hand_off=st.booleans())
    def admit(self, hand_off: bool) -> None:
        for admitted in self.admission.admit(self.scheduler.num_wanted_pages):
            if hand_off and not self.prefill_role:
                self.arriving[admitted.request] = admitted.allocation
            else:
                self.add(admitted.request, admitted.allocation, admitted.allocation.num_cached_tokens)

    @precondition(lambda self: self.arriving)
    @rule()
    def arrive(self) -> None:
        """A prefiller has written what the prefix cache lacked."""
        request, allocation = next(iter(self.arriving.items()))
        del self.arriving[request]
        prompt, _ = self.asked[request]
        pages = [int(page) for page in allocation.pages]
        self.executor.store(pages, list(prompt), allocation.num_cached_tokens, len(prompt) - 1)
        self.add(request, allocation, len(prompt) - 1)

    def add(self, request: RequestId, allocation: Allocation, num_computed: int) -> None:
        prompt, sampling = self.asked[request]
        self.scheduled[request] = Sequence(
            id=SequenceId(next(self.ids)),
            request=request,
            prompt=prompt,
            sampling=None if self.prefill_role else sampling,
            pages=allocation.pages,
            num_cached=allocation.num_cached_tokens,
            num_computed=num_computed,
        )
        self.scheduler.add(self.scheduled[request])

    @precondition(lambda self: self.plan is None)
    @rule()
    def schedule(self) -> None:
        running = [sequence for sequence in self.scheduled.values() if sequence.pages]
        decoding = [sequence for sequence in running if sequence.decoding]
        counter = self.executor.counter
        self.plan = self.scheduler.schedule()
        if self.plan is None:
            return
        self.num_steps += 1
        assert self.plan.counter_base == counter
        for sequence in decoding:
            assert sequence.request in self.plan.requests or not sequence.pages, "a decoding sequence was left out"
        if len(running) > len(decoding) and not self.scheduler.num_preempted:
            assert len(self.plan.requests) + len(self.plan.chunks) > len(decoding), "no prompt got on"
        self.check_chunks(self.plan)
        self.sampled = self.executor.run(self.plan.step)

    def check_chunks(self, plan: StepPlan) -> None:
        assert bool(plan.chunks) <= self.prefill_role
        for chunk in plan.chunks:
            assert chunk.start == self.sent.get(chunk.request, 0)
            assert chunk.is_last == (chunk.end == len(self.asked[chunk.request][0]) - 1)
            assert chunk.is_last or chunk.end % self.pool.page_tokens == 0
            assert chunk.armed == (chunk.request in plan.requests)
            first, end = chunk.start // self.pool.page_tokens, self.pool.num_pages_for(chunk.end)
            assert chunk.pages == self.pool.pages_of(chunk.request)[first:end]
            self.sent[chunk.request] = chunk.end

    @precondition(lambda self: self.plan is not None)
    @rule()
    def complete(self) -> None:
        plan, self.plan = self.plan, None
        assert plan is not None
        for outcome in self.scheduler.complete(plan, self.sampled):
            assert (outcome.request in self.removed) == isinstance(outcome, Removed)
            match outcome:
                case TokenSampled(request=request, token=token, finish=finish, stop_token=stop_token):
                    self.output[request].append(token)
                    assert (stop_token is not None) == (finish is FinishReason.STOP)
                    if finish is not None:
                        prompt, sampling = self.asked[request]
                        assert self.output[request] == answer(prompt, sampling, self.max_sequence_tokens)
                        self.admission.learn(len(self.output[request]))
                        self.end(request)
                case PrefillComputed(request=request):
                    assert self.sent[request] == len(self.asked[request][0]) - 1
                    del self.scheduled[request]
                    self.sending.add(request)
                case Removed(request=request):
                    self.removed.remove(request)
                    self.end(request)
                case Preempted(request=request):
                    assert request in self.scheduled
                case _:
                    raise AssertionError(outcome)

    @precondition(lambda self: self.plan is None)
    @rule(num_steps=st.integers(2, 6))
    def several_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.schedule()
            if self.plan is not None:
                self.complete()
            assert self.pool.check() == []

    @precondition(lambda self: self.sending)
    @rule()
    def writes_end(self) -> None:
        """The source pages have kept what was computed until the last write ended."""
        request = min(self.sending)
        prompt, _ = self.asked[request]
        self.executor.check([int(page) for page in self.pool.pages_of(request)], list(prompt), len(prompt) - 1)
        self.sending.remove(request)
        self.end(request)

    def end(self, request: RequestId) -> None:
        self.pool.release(request)
        self.admission.release_slot(request, now_s=float(self.num_steps))
        self.scheduled.pop(request, None)
        del self.asked[request]

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(sorted(self.asked)))
        if self.admission.withdraw(request):
            del self.asked[request]
        elif request in self.arriving:
            del self.arriving[request]
            self.pool.quarantine(request)
            self.in_quarantine.add(request)
            self.end(request)
        elif request in self.scheduled:
            in_step = self.plan is not None and request in self.plan.requests
            assert self.scheduler.remove(request) == in_step
            del self.scheduled[request]
            if in_step:
                self.removed.add(request)
                assert self.scheduler.remove(request), "asking again changed the answer"
            else:
                self.end(request)

    @precondition(lambda self: self.in_quarantine)
    @rule()
    def drain(self) -> None:
        request = min(self.in_quarantine)
        self.in_quarantine.remove(request)
        self.pool.absolve(request)

    @invariant()
    def pool_is_sound(self) -> None:
        if hasattr(self, "pool"):
            assert self.pool.check() == []
            for sequence in self.scheduled.values():
                assert sequence.num_cached <= sequence.num_computed <= sequence.goal <= sequence.num_tokens

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        limit = self.num_steps + 600
        while self.asked or self.in_quarantine or self.plan is not None:
            assert self.num_steps < limit, "not everything finishes"
            progress = self.turn()
            assert progress, f"stuck with {sorted(self.asked)}"
        assert self.scheduler.num_running == self.scheduler.num_preempted == self.admission.num_admitted == 0
        assert self.pool.check() == []
        assert self.pool.available == self.pool.num_pages
        final = self.scheduler.schedule()
        if final is not None:
            self.executor.run(final.step)
            self.scheduler.complete(final, [])
        assert not self.executor.sequences
        assert self.scheduler.schedule() is None

    def turn(self) -> bool:
        """Everything that can happen by itself; False when nothing did."""
        before = self.num_steps, len(self.asked), len(self.arriving), len(self.sending), self.admission.num_waiting
        if self.plan is not None:
            self.complete()
            return True
        if self.in_quarantine:
            self.drain()
            return True
        if self.arriving:
            self.arrive()
        if self.sending:
            self.writes_end()
        self.admit(hand_off=self.num_steps % 2 == 0)
        self.schedule()
        now = self.num_steps, len(self.asked), len(self.arriving), len(self.sending), self.admission.num_waiting
        return now != before


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=60, deadline=None)
TestScheduler = SchedulerMachine.TestCase
