"""Stories and rows: times, shares, and which request a prefix means."""

from __future__ import annotations

import pytest

from pdd.base.errors import BadRequest, NotFound
from pdd.base.ids import ReplicaName, RequestId
from pdd.daemon.records import Record
from pdd.daemon.stories import Stories
from pdd.lifecycle import events as e
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.table import DECODE


def handed_off(request: str) -> Record:
    machine = Machine(DECODE, RequestId(request), 10.0)
    steps = [e.PagesAllocated(), e.TicketSent(), e.PrefillDone(), e.Arrived(), e.Scheduled(), e.Finished("length")]
    for at_s, event in enumerate(steps, start=11):
        machine.apply(event, float(at_s))
    record = Record(machine, "decode", ReplicaName("decode0/0"), (1, 2, 3))
    record.transfer.num_bytes = 4_000_000_000
    record.transfer.first_s, record.transfer.last_s = 12.0, 14.0
    record.transfer.prefill_done_s = 13.5
    record.first_token_s = 15.25
    return record


def test_a_story_tells_times_and_rates() -> None:
    stories = Stories()
    stories.ended(handed_off("cmpl-aa"), 16.0)
    (story,) = stories.find([], "cmpl-a", 99.0)
    assert [(line.at_s, line.state) for line in story.lines][:3] == [(0, "queued"), (1, "allocated"), (2, "prefilling")]
    assert story.seconds_in == {
        "queued": 1.0, "allocated": 1.0, "prefilling": 1.0, "transferring": 1.0, "ready": 1.0, "decoding": 1.0,
    }  # fmt: skip
    assert story.gigabytes_per_s == 2.0
    assert story.ready_after_prefill_end_s == 0.5
    assert story.ttft_s == 5.25


def test_a_prefix_must_mean_one_request() -> None:
    stories = Stories()
    for request in ("cmpl-aa", "cmpl-ab", "cmpl-a"):
        stories.ended(handed_off(request), 16.0)
    assert stories.find([], "cmpl-a", 0.0)[0].request == "cmpl-a"  # a whole id wins over being a prefix
    with pytest.raises(BadRequest, match="3 requests"):
        stories.find([], "cmpl", 0.0)
    with pytest.raises(NotFound, match="'chat'"):
        stories.find([], "chat", 0.0)


def test_rows_show_running_requests_first_and_only_the_latest_ended_ones() -> None:
    stories = Stories()
    for index in range(30):
        stories.ended(handed_off(f"cmpl-{index}"), 16.0)
    running = Record(Machine(DECODE, RequestId("cmpl-x"), 90.0), "decode", ReplicaName("decode0/0"), (1,))
    rows = stories.rows([running], 100.0, num_ended=2)
    assert [row.request for row in rows] == ["cmpl-x", "cmpl-29", "cmpl-28"]
    assert rows[0].age_s == rows[0].state_s == 10.0
    assert rows[1].age_s == 6.0
