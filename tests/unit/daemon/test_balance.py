"""Choices are made by load first; the prompt's beginning only breaks ties."""

from __future__ import annotations

from typing import Any

from pdd.base.ids import ReplicaName
from pdd.daemon.balance import Candidate, choose_decoder, choose_prefiller


def candidate(name: str, **fields: Any) -> Candidate:
    known: dict[str, Any] = {
        "num_tokens": 4096,
        "free_pages": 100,
        "page_tokens": 1,
        "num_queued": 0,
        "num_running": 0,
        "queued_tokens": 0,
        "max_sequences": 8,
    }
    return Candidate(name=ReplicaName(name), **{**known, **fields})


def test_nobody_is_chosen_from_nobody() -> None:
    assert choose_decoder([], [1]) is None
    assert choose_prefiller([], [1]) is None


def test_a_decoder_with_room_is_preferred_to_an_idle_one_without() -> None:
    full, busy = candidate("full/0", free_pages=2), candidate("busy/0", num_running=7)
    choice = choose_decoder([full, busy], [1, 2, 3])
    assert choice is not None
    assert choice.name == "busy/0"


def test_room_is_counted_in_tokens_where_page_sizes_differ() -> None:
    small = candidate("small/0", free_pages=20, page_tokens=1)
    large = candidate("large/0", free_pages=10, page_tokens=256, num_running=4)
    choice = choose_decoder([small, large], range(100))
    assert choice is not None
    assert choice.name == "large/0"


def test_load_is_relative_to_what_a_decoder_can_run() -> None:
    large, small = candidate("large/0", num_running=8, max_sequences=32), candidate("small/0", num_running=4)
    choice = choose_decoder([large, small], [1])
    assert choice is not None
    assert choice.name == "large/0"


def test_the_prefiller_with_fewer_waiting_tokens_is_chosen() -> None:
    choice = choose_prefiller([candidate("a/0", queued_tokens=900), candidate("b/0", queued_tokens=10)], [1])
    assert choice is not None
    assert choice.name == "b/0"
    assert "10 prompt tokens" in choice.reason


def test_one_that_may_be_stuck_is_chosen_only_where_there_is_no_other() -> None:
    late, busy = candidate("late/0", late=True), candidate("busy/0", num_running=8, queued_tokens=900)
    for choose in (choose_decoder, choose_prefiller):
        choice, only = choose([late, busy], [1]), choose([late], [1])
        assert (choice and choice.name, only and only.name) == ("busy/0", "late/0")


def test_equal_beginnings_meet_and_different_ones_spread() -> None:
    candidates = [candidate(f"p{index}/0") for index in range(4)]

    def name(prompt: list[int]) -> str:
        choice = choose_prefiller(candidates, prompt)
        assert choice is not None
        return choice.name

    assert name([*range(64), 7]) == name([*range(64), 8, 9])
    names = [name([seed, *range(63)]) for seed in range(200)]
    assert all(names.count(candidate.name) > 20 for candidate in candidates)
