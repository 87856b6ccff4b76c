from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pdd.base.errors import InvariantBroken
from pdd.base.ids import RequestId, SequenceId
from pdd.engine.plan import Failed, Outcome, Preempted, PrefillComputed, Removed, StepPlan, TokenSampled
from pdd.engine.protocol import Sampled
from pdd.engine.scheduler import Scheduler
from pdd.engine.sequence import Sequence
from pdd.lifecycle.request import FinishReason, SamplingParams, TokenLogprobs
from pdd.memory.pool import PagePool

PAGE_TOKENS = 4
A, B, C = map(RequestId, "abc")


class Replica:
    """A pool, a scheduler and an executor that samples what it is told to."""

    def __init__(
        self,
        num_pages: int = 32,
        chunk_tokens: int = 16,
        max_sequence_tokens: int = 1000,
        token: Callable[[], int] = lambda: 5,
    ) -> None:
        self.pool = PagePool(num_pages, PAGE_TOKENS, prefix_cache=True)
        self.scheduler = Scheduler(
            self.pool, num_layers=10, chunk_tokens=chunk_tokens, max_sequence_tokens=max_sequence_tokens
        )
        self.ids = itertools.count(1)
        self.token = token

    def add(
        self, request: RequestId, prompt: list[int], max_tokens: int = 100, handed_off: bool = False, **sampling: object
    ) -> Sequence:
        params = SamplingParams(max_tokens=max_tokens, **sampling)  # type: ignore[arg-type]
        return self.add_sequence(request, prompt, params, len(prompt), handed_off)

    def add_prefill(self, request: RequestId, prompt: list[int]) -> Sequence:
        return self.add_sequence(request, prompt, None, len(prompt) - 1, False)

    def add_sequence(
        self, request: RequestId, prompt: list[int], params: SamplingParams | None, num_tokens: int, handed_off: bool
    ) -> Sequence:
        allocation = self.pool.allocate(request, prompt, num_tokens)
        sequence = Sequence(
            id=SequenceId(next(self.ids)),
            request=request,
            prompt=tuple(prompt),
            sampling=params,
            pages=allocation.pages,
            num_cached=allocation.num_cached_tokens,
            num_computed=len(prompt) - 1 if handed_off else allocation.num_cached_tokens,
        )
        self.scheduler.add(sequence)
        return sequence

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        assert plan is not None
        return plan

    def complete(self, plan: StepPlan) -> list[Outcome]:
        sampled = [Sampled(row.sequence, self.token(), None) for row in plan.step.rows if row.sample]
        outcomes = self.scheduler.complete(plan, sampled)
        assert self.pool.check() == []
        return outcomes

    def step(self) -> tuple[StepPlan, list[Outcome]]:
        plan = self.schedule()
        return plan, self.complete(plan)


def rows(plan: StepPlan) -> dict[str, tuple[int, int, bool]]:
    """request -> first position, end, whether it samples."""
    return {
        request: (row.start, row.start + len(row.tokens), row.sample)
        for request, row in zip(plan.requests, plan.step.rows, strict=True)
    }


def fresh(name: int, num_tokens: int) -> list[int]:
    """A prompt that shares nothing with others."""
    return [1000 * name + position for position in range(num_tokens)]


def test_nothing_to_do() -> None:
    assert Replica().scheduler.schedule() is None


def test_a_prompt_goes_in_chunks_and_then_token_by_token() -> None:
    replica = Replica(chunk_tokens=8)
    sequence = replica.add(A, fresh(1, 11), max_tokens=2)
    first, outcomes = replica.step()
    assert (rows(first), outcomes) == ({A: (0, 8, False)}, [])
    assert first.started == (A,)
    (start,) = first.step.start
    assert (start.prompt, start.output, start.pages) == (fresh(1, 11), [], sequence.pages[:3])
    second, (sampled,) = replica.step()
    assert rows(second) == {A: (8, 11, True)}
    assert (second.started, second.step.start) == ((), [])
    assert sampled == TokenSampled(request=A, token=5, logprobs=None, finish=None, stop_token=None)
    third, (last,) = replica.step()
    assert rows(third) == {A: (11, 12, True)}
    assert third.step.rows[0].tokens == [5]
    assert isinstance(last, TokenSampled)
    assert last.finish is FinishReason.LENGTH
    assert sequence.output == [5, 5]
    assert replica.pool.owners() == {A: 3}, "the caller releases"
    assert [plan.counter_base for plan in (first, second, third)] == [0, 10, 20]
    assert all(plan.chunks == () for plan in (first, second, third))


def test_the_executor_is_told_what_to_forget_and_then_there_is_peace() -> None:
    replica = Replica()
    sequence = replica.add(A, [1], max_tokens=1)
    replica.step()
    bookkeeping, outcomes = replica.step()
    assert bookkeeping.step.release == [sequence.id]
    assert (bookkeeping.step.rows, outcomes) == ([], [])
    assert replica.scheduler.schedule() is None
    replica.add(B, [1])
    assert replica.schedule().counter_base == 10, "a step without rows does not move the counter"


def test_a_handed_off_sequence_decodes_in_its_first_step_and_its_prompt_is_shared() -> None:
    replica = Replica()
    replica.add(A, fresh(1, 9), handed_off=True)
    assert rows(replica.schedule()) == {A: (8, 9, True)}
    assert replica.add(B, fresh(1, 9)).num_cached == 8


def test_decodes_come_first_and_prompts_share_the_step() -> None:
    replica = Replica(chunk_tokens=8)
    replica.add(A, fresh(1, 30))
    replica.add(B, fresh(2, 5), handed_off=True)
    replica.add(C, fresh(3, 6), handed_off=True)
    plan = replica.schedule()
    assert plan.requests == (B, C, A)
    assert rows(plan) == {B: (4, 5, True), C: (5, 6, True), A: (0, 8, False)}


def test_short_prompts_do_not_wait_for_a_long_one_nor_it_for_them() -> None:
    replica = Replica(num_pages=200, chunk_tokens=16)
    replica.add_prefill(A, fresh(1, 161))
    replica.step()
    done = []
    for number in range(2, 20):
        replica.add_prefill(RequestId(f"short{number}"), fresh(number, 9))
        plan, outcomes = replica.step()
        assert sum(len(row.tokens) for row in plan.step.rows) == 16
        assert f"short{number}" in plan.requests
        done += [outcome.request for outcome in outcomes]
        if A in done:
            break
    assert sorted(done) == sorted([A, *(f"short{number}" for number in range(2, number + 1))])


def test_equal_prompts_take_turns() -> None:
    replica = Replica(num_pages=200, chunk_tokens=8)
    for name, request in enumerate((A, B, C)):
        replica.add_prefill(request, fresh(name, 41))
    served = [replica.step()[0].requests for _ in range(3)]
    assert {request for requests in served for request in requests} == {A, B, C}


def test_a_page_larger_than_the_chunk_still_gets_on() -> None:
    replica = Replica(chunk_tokens=1)
    replica.add_prefill(A, fresh(1, 8))
    assert rows(replica.step()[0]) == {A: (0, 4, False)}


def test_pages_grow_with_the_tokens() -> None:
    replica = Replica()
    sequence = replica.add(A, fresh(1, 4))
    first, _ = replica.step()
    assert first.step.rows[0].new_pages == []
    second, _ = replica.step()
    assert second.step.rows[0].new_pages == sequence.pages[1:]
    assert len(sequence.pages) == 2
    assert replica.step()[0].step.rows[0].new_pages == []


@pytest.mark.parametrize(
    ("tokens", "min_tokens", "output", "finish"),
    [
        ([2], 0, [2], FinishReason.STOP),
        ([5, 2], 0, [5, 2], FinishReason.STOP),
        ([5, 6, 7], 0, [5, 6, 7], FinishReason.LENGTH),
        ([5, 6, 2], 0, [5, 6, 2], FinishReason.STOP),
        ([2, 2], 2, [2, 2], FinishReason.STOP),
    ],
)
def test_how_a_sequence_finishes(tokens: list[int], min_tokens: int, output: list[int], finish: FinishReason) -> None:
    replica = Replica(token=iter(tokens).__next__)
    replica.add(A, fresh(1, 3), max_tokens=3, stop_token_ids=(2, 3), min_tokens=min_tokens)
    seen = []
    for _ in output:
        (outcome,) = replica.step()[1]
        assert isinstance(outcome, TokenSampled)
        seen.append(outcome.token)
    assert seen == output
    assert (outcome.finish, outcome.stop_token) == (finish, 2 if finish is FinishReason.STOP else None)
    assert replica.scheduler.num_running == 0


@pytest.mark.parametrize(("prompt_tokens", "num_output"), [(7, 1), (6, 2), (8, 1)])
def test_the_longest_sequence(prompt_tokens: int, num_output: int) -> None:
    replica = Replica(max_sequence_tokens=8)
    replica.add(A, fresh(1, prompt_tokens))
    outcomes = [replica.step()[1][0] for _ in range(num_output)]
    assert [isinstance(o, TokenSampled) and o.finish for o in outcomes] == [None] * (num_output - 1) + ["length"]


def test_logprobs_pass_through() -> None:
    replica = Replica()
    sequence = replica.add(A, [1])
    logprobs = TokenLogprobs(9, -0.5, ((9, -0.5),))
    (outcome,) = replica.scheduler.complete(replica.schedule(), [Sampled(sequence.id, 9, logprobs)])
    assert isinstance(outcome, TokenSampled)
    assert outcome.logprobs is logprobs


def test_only_kv_that_is_in_place_is_shared() -> None:
    replica = Replica()
    replica.add(A, fresh(1, 7))
    plan = replica.schedule()
    assert replica.pool.match(fresh(1, 7), 7) == [], "the step has not run"
    replica.complete(plan)
    tokens = [*fresh(1, 7), 5]
    assert len(replica.pool.match(tokens, 8)) == 1, "the sampled token fills the page but is not computed"
    replica.step()
    assert len(replica.pool.match(tokens, 8)) == 2


def test_a_prefill_replica_announces_its_chunks() -> None:
    replica = Replica(chunk_tokens=8)
    sequence = replica.add_prefill(A, fresh(1, 12))
    first, outcomes = replica.step()
    (chunk,) = first.chunks
    assert (chunk.start, chunk.end, chunk.is_last, chunk.armed) == (0, 8, False, True)
    assert chunk.pages == tuple(sequence.pages[:2])
    assert outcomes == []
    second, outcomes = replica.step()
    (chunk,) = second.chunks
    assert (chunk.start, chunk.end, chunk.is_last, chunk.armed) == (8, 11, True, True)
    assert chunk.pages == tuple(sequence.pages[2:])
    assert outcomes == [PrefillComputed(A)]
    assert second.step.start == [] != first.step.start
    assert first.step.start[0].sampling is None
    assert not any(row.sample for row in first.step.rows + second.step.rows)
    assert replica.pool.owners() == {A: 3}, "they are still being sent"


def test_cached_positions_are_announced_with_the_first_chunk() -> None:
    replica = Replica()
    replica.add_prefill(A, fresh(1, 9))
    replica.step()
    replica.add_prefill(B, [*fresh(1, 8), *fresh(2, 5)])
    plan = replica.schedule()
    assert rows(plan) == {B: (8, 12, False)}
    assert [(chunk.start, chunk.end, chunk.armed) for chunk in plan.chunks] == [(0, 12, True)]


def test_a_wholly_cached_prompt_needs_no_row_and_no_counter() -> None:
    replica = Replica()
    replica.add_prefill(A, fresh(1, 9))
    replica.step()
    replica.add_prefill(B, fresh(1, 9))
    plan, outcomes = replica.step()
    assert plan.step.rows == []
    assert [(chunk.start, chunk.end, chunk.is_last, chunk.armed) for chunk in plan.chunks] == [(0, 8, True, False)]
    assert outcomes == [PrefillComputed(B)]
    assert replica.scheduler.schedule() is None


def test_the_youngest_is_preempted_and_starts_again_with_what_it_said() -> None:
    replica = Replica(num_pages=4)
    old = replica.add(A, fresh(1, 8), max_tokens=6)
    young = replica.add(B, fresh(2, 7), max_tokens=3)
    replica.step()
    plan, outcomes = replica.step()
    assert outcomes[0] == Preempted(B)
    assert rows(plan) == {A: (8, 9, True)}
    assert plan.step.release == [young.id]
    assert (young.output, replica.scheduler.num_preempted, replica.scheduler.num_wanted_pages) == ([5], 1, 2)
    while replica.scheduler.num_running:
        plan, outcomes = replica.step()
        assert B not in plan.requests
    replica.pool.release(A)
    plan, outcomes = replica.step()
    assert plan.started == (B,)
    assert old.id in plan.step.release
    (start,) = plan.step.start
    assert (start.sequence, start.prompt, start.output) == (young.id, fresh(2, 7), [5])
    assert rows(plan)[B][1:] == (8, True)
    _, (last,) = replica.step()
    assert isinstance(last, TokenSampled)
    assert last.finish is FinishReason.LENGTH
    assert young.output == [5, 5, 5]


def test_preempted_sequences_restart_oldest_first_and_leave_room_to_grow() -> None:
    replica = Replica(num_pages=6)
    for name, request in enumerate((A, B, C)):
        replica.add(request, fresh(name, 8))
    replica.step()
    assert replica.step()[1][:1] == [Preempted(C)]
    for _ in range(3):
        replica.step()
    assert replica.step()[1][:1] == [Preempted(B)]
    # A holds 4 pages. B needs 4 (12 tokens and one to come), C needs 3, and A may soon want one more.
    assert replica.pool.available == 2
    replica.scheduler.remove(A)
    replica.pool.release(A)
    assert replica.step()[0].started == (B,), "C would fit, but B could then not grow"


def test_a_sequence_alone_waits_for_pages_that_others_hold() -> None:
    replica = Replica(num_pages=3)
    replica.pool.allocate(C, fresh(3, 4), 4)  # a handoff on its way
    replica.add(A, fresh(1, 8))
    replica.step()
    plan, outcomes = replica.step()
    assert (plan.step.rows, outcomes) == ([], [Preempted(A)])
    assert replica.scheduler.schedule() is None
    replica.pool.release(C)
    assert rows(replica.schedule())[A][1:] == (9, True)


def test_a_sequence_that_outgrows_the_whole_pool_fails_with_the_numbers() -> None:
    replica = Replica(num_pages=3)
    replica.add(A, fresh(1, 11))
    replica.step()
    replica.step()
    plan, outcomes = replica.step()
    assert plan.step.rows == []
    assert outcomes == [Failed(A, "13 tokens need 4 pages of KV cache; the replica has 3")]
    assert replica.scheduler.num_running == 0
    assert replica.pool.owners() == {A: 3}, "the caller releases"


def test_removing_between_steps_frees_at_once() -> None:
    replica = Replica()
    sequence = replica.add(A, fresh(1, 9))
    replica.step()
    assert not replica.scheduler.remove(A)
    assert not replica.scheduler.remove(A)
    plan, outcomes = replica.step()
    assert (plan.step.release, outcomes) == ([sequence.id], [])


def test_what_the_executor_never_saw_it_need_not_forget() -> None:
    replica = Replica()
    replica.add(A, fresh(1, 9))
    assert not replica.scheduler.remove(A)
    assert replica.scheduler.schedule() is None


def test_removing_during_a_step_waits_for_its_end() -> None:
    replica = Replica(chunk_tokens=4)
    replica.add(A, fresh(1, 3))
    replica.add(B, fresh(2, 40))
    plan = replica.schedule()
    assert plan.requests == (A,)
    assert replica.scheduler.remove(A)
    assert replica.scheduler.remove(A)
    assert not replica.scheduler.remove(B)
    assert replica.complete(plan) == [Removed(A)]
    assert replica.step()[0].requests == ()


def test_a_preempted_sequence_can_be_removed() -> None:
    replica = Replica(num_pages=4)
    replica.add(A, fresh(1, 8))
    replica.add(B, fresh(2, 8))
    replica.step()
    plan = replica.schedule()
    assert not replica.scheduler.remove(B)
    outcomes = replica.complete(plan)
    assert [outcome.request for outcome in outcomes] == [A]
    assert (replica.scheduler.num_preempted, replica.scheduler.num_wanted_pages) == (0, 0)


def test_load_counts() -> None:
    replica = Replica()
    replica.add(A, fresh(1, 30))
    replica.add(B, fresh(2, 9), handed_off=True)
    assert (replica.scheduler.num_running, replica.scheduler.num_prefill_tokens) == (2, 30)


def test_one_step_at_a_time() -> None:
    replica = Replica()
    replica.add(A, [1, 2])
    plan = replica.schedule()
    with pytest.raises(InvariantBroken, match="step 0 is still in flight"):
        replica.scheduler.schedule()
    replica.complete(plan)
    with pytest.raises(InvariantBroken, match="step 0 is not in flight"):
        replica.complete(plan)


@pytest.mark.parametrize("answers", [[], [99], [1, 1], [1, 99]])
def test_an_executor_that_answers_wrongly_changes_nothing(answers: list[int]) -> None:
    replica = Replica()
    sequence = replica.add(A, [1, 2])
    plan = replica.schedule()
    with pytest.raises(InvariantBroken, match=r"samples for sequences \[1\], the executor answered for"):
        replica.scheduler.complete(plan, [Sampled(SequenceId(answer), 5, None) for answer in answers])
    assert (sequence.num_computed, sequence.output) == (0, [])
    assert len(replica.complete(plan)) == 1


def test_a_request_is_scheduled_once() -> None:
    replica = Replica()
    sequence = replica.add(A, [1, 2])
    with pytest.raises(InvariantBroken, match="a is scheduled already"):
        replica.scheduler.add(sequence)
