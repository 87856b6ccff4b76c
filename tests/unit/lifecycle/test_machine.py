"""The machines follow their tables, refuse what the tables do not allow, and always end."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdd.base.errors import IllegalEvent, NoPath
from pdd.base.ids import RequestId
from pdd.lifecycle import events as e
from pdd.lifecycle.events import Effect
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.table import DECODE, PREFILL, DecodeState, PrefillState, Table, render

REQUEST = RequestId("cmpl-1")
EVENTS = sorted({event for table in (DECODE, PREFILL) for _, event in table.moves}, key=lambda event: event.__name__)


def run(table: Table, *events: e.Event) -> Machine:
    machine = Machine(table, REQUEST, 0.0)
    for at_s, event in enumerate(events, start=1):
        machine.apply(event, float(at_s))
    return machine


def test_a_handed_off_request_goes_through_every_state_in_order() -> None:
    machine = run(
        DECODE, e.PagesAllocated(), e.TicketSent("to prefill0/0"), e.PrefillerAccepted(), e.PrefillDone(), e.Arrived(),
        e.Scheduled(), e.Finished("length"),
    )  # fmt: skip
    states = [str(entry.state) for entry in machine.story]
    assert states == [
        "queued",
        "allocated",
        "prefilling",
        "prefilling",
        "transferring",
        "ready",
        "decoding",
        "finished",
    ]
    assert machine.terminal
    assert machine.seconds_in(100.0)[DecodeState.PREFILLING] == 2.0


def test_the_count_may_come_before_the_news_of_the_end() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent(), e.Arrived(), e.PrefillDone())
    assert machine.state is DecodeState.READY


def test_cancel_in_flight_drains_before_pages_are_released() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent())
    assert list(machine.apply(e.CancelAsked("client gone"), 3.0)) == [Effect.STOP_HANDOFF, Effect.TELL]
    assert machine.state is DecodeState.DRAINING
    assert machine.ending
    assert list(machine.apply(e.Drained(), 4.0)) == [Effect.RELEASE]
    assert machine.state is DecodeState.CANCELLED


def test_all_pieces_arriving_ends_a_drain_too() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent(), e.CancelAsked(), e.Arrived())
    assert machine.state is DecodeState.CANCELLED


def test_a_failed_handoff_is_routed_again_with_the_same_pages() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent(), e.HandoffFailed("rejected"))
    assert not machine.ending
    assert list(machine.apply(e.Drained(), 4.0)) == [Effect.ROUTE]
    assert machine.state is DecodeState.ALLOCATED


def test_a_cancel_during_a_retry_drain_changes_the_goal_and_tells_once() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent(), e.HandoffFailed())
    assert list(machine.apply(e.CancelAsked(), 4.0)) == [Effect.TELL]
    assert list(machine.apply(e.CancelAsked(), 5.0)) == []
    assert list(machine.apply(e.Drained(), 6.0)) == [Effect.RELEASE]
    assert machine.state is DecodeState.CANCELLED


def test_the_first_error_is_the_one_that_is_told() -> None:
    machine = run(DECODE, e.PagesAllocated(), e.TicketSent(), e.CancelAsked())
    machine.apply(e.broken(NoPath("late")), 4.0)
    assert machine.error is None
    machine = run(DECODE, e.PagesAllocated(), e.broken(NoPath("no prefiller")))
    assert machine.error is not None
    assert (machine.error.http_status, machine.error.message) == (503, "no prefiller")


def test_prefill_side_confirms_a_stop_after_its_writes_ended() -> None:
    machine = run(PREFILL, e.PagesAllocated(), e.Scheduled())
    assert list(machine.apply(e.CancelAsked(), 3.0)) == [Effect.STOP_WRITES]
    assert list(machine.apply(e.Stopped(), 4.0)) == [Effect.CONFIRM_STOP, Effect.RELEASE]
    assert machine.state is PrefillState.CANCELLED


@given(st.sampled_from([DECODE, PREFILL]), st.lists(st.sampled_from(EVENTS), max_size=30))
def test_any_event_either_moves_by_the_table_or_raises_and_changes_nothing(
    table: Table, kinds: list[type[e.Event]]
) -> None:
    machine = Machine(table, REQUEST, 0.0)
    released = 0
    for kind in kinds:
        before = (machine.state, len(machine.story), machine.ending)
        if machine.allows(kind):
            effects = machine.apply(kind(), 1.0)
            released += list(effects).count(Effect.RELEASE)
        else:
            with pytest.raises(IllegalEvent, match="story: "):
                machine.apply(kind(), 1.0)
            assert before == (machine.state, len(machine.story), machine.ending)
        assert released == (1 if machine.terminal else 0)


@pytest.mark.parametrize("table", [DECODE, PREFILL], ids=lambda table: table.name)
def test_every_state_is_reachable_and_can_reach_an_end(table: Table) -> None:
    goals = set(table.on_goal)
    edges = {
        (state, target)
        for (state, _), move in table.moves.items()
        for target in ([move.target] if move.target else goals)
    }
    reachable = {table.start}
    while True:
        grown = reachable | {target for state, target in edges if state in reachable}
        if grown == reachable:
            break
        reachable = grown
    assert reachable == {state for state, _ in table.moves} | table.terminal
    ending = set(table.terminal)
    for _ in range(len(reachable)):
        ending |= {state for state, target in edges if target in ending}
    assert ending == reachable


@pytest.mark.parametrize("table", [DECODE, PREFILL], ids=lambda table: table.name)
def test_no_state_that_may_be_written_into_is_left_without_a_drain(table: Table) -> None:
    """A terminal state is entered from a state with writes in flight only by the count or the end of the writes."""
    in_flight = {DecodeState.PREFILLING, DecodeState.TRANSFERRING, PrefillState.PREFILLING, PrefillState.TRANSFERRING}
    for (state, event), move in table.moves.items():
        if state in in_flight and move.target in table.terminal:
            assert event in (e.Sent, e.Stopped)


def test_docs_show_the_tables_as_they_are() -> None:
    text = (Path(__file__).parents[3] / "docs" / "states.md").read_text()
    for table in (DECODE, PREFILL):
        assert render(table) in text
