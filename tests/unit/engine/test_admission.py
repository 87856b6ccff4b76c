from __future__ import annotations

import pytest

from pdd.base.errors import BadRequest, InvariantBroken, QueueFull
from pdd.base.ids import RequestId, SequenceId
from pdd.engine.admission import LOOKAHEAD, MAX_PASSES, Admission
from pdd.engine.plan import Preempted, TokenSampled
from pdd.engine.protocol import Sampled
from pdd.engine.scheduler import Scheduler
from pdd.engine.sequence import Sequence
from pdd.lifecycle.request import SamplingParams
from pdd.memory.pool import PagePool


def admission(num_pages: int = 8, max_sequences: int = 4, max_queue: int = 8) -> tuple[PagePool, Admission]:
    """Pages of 4 tokens."""
    pool = PagePool(num_pages, 4, prefix_cache=True)
    return pool, Admission(pool, max_sequences=max_sequences, max_queue=max_queue)


def enqueue(line: Admission, name: str, num_pages: int, max_answer_tokens: int = 0) -> RequestId:
    """A prompt that shares nothing with others and fills `num_pages` pages."""
    prompt = (sum(name.encode()) * 1000, *range(num_pages * 4 - 1))
    line.enqueue(RequestId(name), prompt, num_pages * 4, max_answer_tokens)
    return RequestId(name)


def names(line: Admission, wanted_pages: int = 0) -> list[str]:
    return [admitted.request for admitted in line.admit(wanted_pages)]


def end(pool: PagePool, line: Admission, name: str, now_s: float = 0.0) -> None:
    pool.release(RequestId(name))
    line.release_slot(RequestId(name), now_s)


def test_first_come_first_served_within_slots() -> None:
    pool, line = admission(max_sequences=2)
    for name in ("a", "b", "c"):
        enqueue(line, name, 1)
    assert names(line) == ["a", "b"]
    assert (line.num_waiting, line.num_admitted, line.num_waiting_tokens) == (1, 2, 4)
    assert names(line) == []
    end(pool, line, "a")
    assert names(line) == ["c"]
    assert pool.owners() == {"b": 1, "c": 1}


def test_small_requests_pass_a_big_one_only_so_often() -> None:
    pool, line = admission(max_sequences=3, max_queue=30)
    enqueue(line, "running", 4)
    assert names(line) == ["running"]
    enqueue(line, "big", 8)
    passed = []
    for number in range(2 * MAX_PASSES):
        enqueue(line, f"small{number}", 1)
        for name in names(line):
            passed.append(name)
            end(pool, line, name)
    assert passed == [f"small{number}" for number in range(MAX_PASSES)]
    assert names(line) == []
    end(pool, line, "running")
    assert names(line) == ["big"]
    end(pool, line, "big")
    assert names(line) == ["small8", "small9", "small10"]


def test_only_the_head_of_a_long_line_is_tried() -> None:
    _, line = admission(max_sequences=4, max_queue=100)
    enqueue(line, "running", 4)
    assert names(line) == ["running"]
    for number in range(LOOKAHEAD):
        enqueue(line, f"big{number}", 5)
    enqueue(line, "small", 1)
    assert names(line) == []


def test_pages_that_answers_need_are_left_to_those_that_run() -> None:
    pool, line = admission(num_pages=6)
    enqueue(line, "a", 3, max_answer_tokens=3)
    enqueue(line, "b", 3)
    assert names(line) == ["a"]
    enqueue(line, "c", 2)
    assert names(line) == ["c"]
    end(pool, line, "c")
    end(pool, line, "a")
    assert names(line) == ["b"]


def test_a_request_needs_room_for_its_own_answer_too() -> None:
    pool, line = admission(num_pages=6)
    enqueue(line, "a", 3)
    enqueue(line, "b", 3, max_answer_tokens=1)
    assert names(line) == ["a"]
    end(pool, line, "a")
    assert names(line) == ["b"]


def test_answers_are_expected_to_be_as_long_as_recent_ones() -> None:
    _, line = admission(num_pages=8)
    enqueue(line, "a", 1, max_answer_tokens=1000)
    assert names(line) == ["a"]
    enqueue(line, "b", 1, max_answer_tokens=1000)
    assert names(line) == []
    for _ in range(200):
        line.learn(8)
    assert round(line.mean_answer_tokens) == 8
    assert names(line) == ["b"]  # twice a page and two more


def test_one_that_has_outlived_the_mean_may_live_as_long_again() -> None:
    pool, line = admission(num_pages=6)
    for _ in range(200):
        line.learn(4)
    enqueue(line, "a", 1, max_answer_tokens=1000)
    assert names(line) == ["a"]
    pool.extend(RequestId("a"), 2)
    enqueue(line, "b", 2)
    assert names(line) == ["b"]
    end(pool, line, "b")
    enqueue(line, "c", 3)
    assert names(line) == []


def test_what_drains_or_was_preempted_grows_no_more() -> None:
    pool, line = admission(num_pages=6)
    enqueue(line, "a", 1, max_answer_tokens=1000)
    assert names(line) == ["a"]
    pool.quarantine(RequestId("a"))
    enqueue(line, "b", 5)
    assert names(line) == ["b"]


def test_a_lone_request_may_have_the_whole_pool() -> None:
    _, line = admission(num_pages=6)
    enqueue(line, "a", 6, max_answer_tokens=1000)
    assert names(line) == ["a"]


def serve(pool: PagePool, line: Admission, lengths: list[int], reserve: bool) -> int:
    """Answers one request after the other as an engine would, and counts preemptions. Each may answer 1000 tokens."""
    scheduler = Scheduler(pool, num_layers=1, chunk_tokens=64, max_sequence_tokens=10_000)
    left = dict(enumerate(lengths))
    asked = iter(list(left))
    num_preempted = 0
    while left:
        while line.num_waiting < 4 and (number := next(asked, None)) is not None:
            prompt = (number, *range(7))
            line.enqueue(RequestId(str(number)), prompt, 8, 1000 if reserve else 0)
        for admitted in line.admit(scheduler.num_wanted_pages):
            number = int(admitted.request)
            sampling = SamplingParams(max_tokens=left[number])
            pages, cached = admitted.allocation.pages, admitted.allocation.num_cached_tokens
            scheduler.add(
                Sequence(
                    id=SequenceId(number), request=admitted.request, prompt=(number, *range(7)), sampling=sampling,
                    pages=pages, num_cached=cached, num_computed=cached,
                )
            )  # fmt: skip
        plan = scheduler.schedule()
        assert plan is not None, "nobody gets on"
        for outcome in scheduler.complete(
            plan, [Sampled(row.sequence, 1, None) for row in plan.step.rows if row.sample]
        ):
            if isinstance(outcome, TokenSampled) and outcome.finish:
                line.learn(left.pop(int(outcome.request)))
                end(pool, line, outcome.request)
            num_preempted += isinstance(outcome, Preempted)
    return num_preempted


@pytest.mark.parametrize("lengths", [[40] * 300, [20, 30, 40, 50, 60] * 60, [10, 10, 10, 10, 160] * 60])
def test_preemptions_are_rare(lengths: list[int]) -> None:
    pool, line = admission(num_pages=100, max_sequences=16)
    careful = serve(pool, line, lengths, reserve=True)
    pool, line = admission(num_pages=100, max_sequences=16)
    careless = serve(pool, line, lengths, reserve=False)
    assert careful * 5 < careless


def test_pages_wanted_by_preempted_sequences_are_left() -> None:
    _, line = admission(num_pages=6)
    enqueue(line, "a", 3)
    assert names(line, wanted_pages=4) == []
    assert names(line, wanted_pages=3) == ["a"]


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    _, line = admission(num_pages=2)
    line.enqueue(RequestId("fits"), tuple(range(8)), 8, 0)
    with pytest.raises(BadRequest, match=r"9 tokens and needs 3 pages .* has 2 of 4 tokens each \(8 tokens") as caught:
        line.enqueue(RequestId("big"), tuple(range(9)), 9, 0)
    assert caught.value.param == "prompt"
    line.enqueue(RequestId("prefill"), tuple(range(9)), 8, 0)
    assert line.num_waiting == 2


def test_a_full_line_says_when_to_come_back() -> None:
    pool, line = admission(max_sequences=1, max_queue=1)
    enqueue(line, "a", 1)
    enqueue(line, "b", 1)
    with pytest.raises(QueueFull, match="0 requests are running and 2 are waiting; at most 1 may wait") as caught:
        enqueue(line, "c", 1)
    assert caught.value.retry_after_s == 1.0
    for now_s in (10.0, 13.0, 18.0):
        name = names(line)[0]
        end(pool, line, name, now_s)
        enqueue(line, f"next{now_s}", 1)
    with pytest.raises(QueueFull) as caught:
        enqueue(line, "c", 1)
    assert caught.value.retry_after_s == 4.0
    assert line.withdraw(RequestId("next18.0"))
    enqueue(line, "c", 1)


def test_the_advice_is_bounded() -> None:
    pool, line = admission(max_sequences=1, max_queue=1)
    for now_s in (0.0, 1e6):
        enqueue(line, "a", 1)
        end(pool, line, names(line)[0], now_s)
    enqueue(line, "a", 1)
    enqueue(line, "b", 1)
    with pytest.raises(QueueFull) as caught:
        enqueue(line, "c", 1)
    assert caught.value.retry_after_s == 60.0


def test_with_no_queue_free_slots_can_still_be_taken() -> None:
    _, line = admission(max_sequences=2, max_queue=0)
    enqueue(line, "a", 1)
    enqueue(line, "b", 1)
    with pytest.raises(QueueFull):
        enqueue(line, "c", 1)
    assert names(line) == ["a", "b"]
    with pytest.raises(QueueFull):
        enqueue(line, "c", 1)


def test_withdraw_and_misuse() -> None:
    _, line = admission()
    a = enqueue(line, "a", 1)
    with pytest.raises(InvariantBroken, match="a stands in line"):
        enqueue(line, "a", 1)
    assert line.withdraw(a)
    assert not line.withdraw(a)
    assert names(line) == []
    with pytest.raises(InvariantBroken, match="a gives back a slot that it does not have"):
        line.release_slot(a, 0.0)


def test_admission_reports_what_the_prefix_cache_held() -> None:
    pool, line = admission()
    prompt = tuple(range(8))
    line.enqueue(RequestId("a"), prompt, 8, 0)
    (first,) = line.admit()
    pool.publish(first.request, prompt, 8)
    line.enqueue(RequestId("b"), prompt, 8, 0)
    (second,) = line.admit()
    assert (first.allocation.num_cached_tokens, second.allocation.num_cached_tokens) == (0, 4)
    assert second.allocation.pages[0] == first.allocation.pages[0]
