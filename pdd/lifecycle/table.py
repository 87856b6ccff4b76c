"""Both machines as data: which event leads from which state to which, and what entering a state orders.

All state lives here and in machine.py. A target of None means: where the machine was heading when it began to drain
(cancelled, failed, or allocated for another try). docs/states.md is rendered from these tables and tested equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from pdd.lifecycle import events as e
from pdd.lifecycle.events import Effect


class DecodeState(StrEnum):
    QUEUED = "queued"
    ALLOCATED = "allocated"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    READY = "ready"
    DECODING = "decoding"
    DRAINING = "draining"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


class PrefillState(StrEnum):
    RECEIVED = "received"
    ALLOCATED = "allocated"
    PREFILLING = "prefilling"
    TRANSFERRING = "transferring"
    DRAINING = "draining"
    SENT = "sent"
    REJECTED = "rejected"
    CANCELLED = "cancelled"
    FAILED = "failed"


State = DecodeState | PrefillState


class Move(msgspec.Struct, frozen=True):
    target: State | None
    """The next state; None: the goal of the drain that ends."""
    effects: tuple[Effect, ...] = ()
    goal: State | None = None
    """Where a drain that begins (or changes its mind) here leads."""


class Table(msgspec.Struct, frozen=True):
    name: str
    start: State
    start_effects: tuple[Effect, ...]
    moves: Mapping[tuple[State, type[e.Event]], Move]
    on_goal: Mapping[State, tuple[Effect, ...]]
    """Effects of reaching a goal at the end of a drain."""
    terminal: frozenset[State]


_D = DecodeState
_END = (Effect.TELL, Effect.RELEASE)


def _decode_moves() -> dict[tuple[State, type[e.Event]], Move]:
    moves: dict[tuple[State, type[e.Event]], Move] = {
        (_D.QUEUED, e.PagesAllocated): Move(_D.ALLOCATED, (Effect.ROUTE,)),
        (_D.ALLOCATED, e.LocalChosen): Move(_D.READY, (Effect.ENQUEUE,)),
        (_D.ALLOCATED, e.TicketSent): Move(_D.PREFILLING),
        (_D.PREFILLING, e.PrefillerAccepted): Move(_D.PREFILLING),
        (_D.PREFILLING, e.PrefillDone): Move(_D.TRANSFERRING),
        (_D.PREFILLING, e.Arrived): Move(_D.READY, (Effect.ENQUEUE,)),
        (_D.TRANSFERRING, e.Arrived): Move(_D.READY, (Effect.ENQUEUE,)),
        # The count can outrun the news on the control link: those only complete the story.
        (_D.READY, e.PrefillerAccepted): Move(_D.READY),
        (_D.READY, e.PrefillDone): Move(_D.READY),
        (_D.DECODING, e.PrefillerAccepted): Move(_D.DECODING),
        (_D.DECODING, e.PrefillDone): Move(_D.DECODING),
        (_D.READY, e.Scheduled): Move(_D.DECODING),
        (_D.DECODING, e.Preempted): Move(_D.READY),
        (_D.READY, e.Preempted): Move(_D.READY),  # the youngest may lose its pages before its first step
        (_D.DECODING, e.Finished): Move(_D.FINISHED, (Effect.RELEASE,)),
        (_D.READY, e.Finished): Move(_D.FINISHED, (Effect.RELEASE,)),
        (_D.DRAINING, e.PrefillerAccepted): Move(_D.DRAINING),
        (_D.DRAINING, e.PrefillDone): Move(_D.DRAINING),
        (_D.DRAINING, e.HandoffFailed): Move(_D.DRAINING),
        (_D.DRAINING, e.Arrived): Move(None),
        (_D.DRAINING, e.Drained): Move(None),
        # The client has been told already when a drain began for good; a retry has not.
        (_D.DRAINING, e.CancelAsked): Move(_D.DRAINING, (Effect.TELL,), goal=_D.CANCELLED),
        (_D.DRAINING, e.Broken): Move(_D.DRAINING, (Effect.TELL,), goal=_D.FAILED),
    }
    for state in (_D.QUEUED, _D.ALLOCATED, _D.READY, _D.DECODING):
        moves[state, e.CancelAsked] = Move(_D.CANCELLED, _END)
        moves[state, e.Broken] = Move(_D.FAILED, _END)
    for state in (_D.PREFILLING, _D.TRANSFERRING):
        stop = (Effect.STOP_HANDOFF, Effect.TELL)
        moves[state, e.CancelAsked] = Move(_D.DRAINING, stop, goal=_D.CANCELLED)
        moves[state, e.Broken] = Move(_D.DRAINING, stop, goal=_D.FAILED)
        moves[state, e.HandoffFailed] = Move(_D.DRAINING, (Effect.STOP_HANDOFF,), goal=_D.ALLOCATED)
    return moves


DECODE = Table(
    name="decode side",
    start=_D.QUEUED,
    start_effects=(Effect.ALLOCATE,),
    moves=_decode_moves(),
    on_goal={
        _D.ALLOCATED: (Effect.ROUTE,),
        _D.CANCELLED: (Effect.RELEASE,),
        _D.FAILED: (Effect.RELEASE,),
    },
    terminal=frozenset({_D.FINISHED, _D.CANCELLED, _D.FAILED}),
)

_P = PrefillState
_STOPPED = (Effect.CONFIRM_STOP, Effect.RELEASE)


def _prefill_moves() -> dict[tuple[State, type[e.Event]], Move]:
    moves: dict[tuple[State, type[e.Event]], Move] = {
        (_P.RECEIVED, e.PagesAllocated): Move(_P.ALLOCATED, (Effect.ENQUEUE,)),
        (_P.RECEIVED, e.Rejected): Move(_P.REJECTED, (Effect.REJECT, Effect.RELEASE)),
        (_P.ALLOCATED, e.Scheduled): Move(_P.PREFILLING),
        (_P.PREFILLING, e.PrefillDone): Move(_P.TRANSFERRING),
        (_P.TRANSFERRING, e.Sent): Move(_P.SENT, (Effect.RELEASE,)),
        (_P.DRAINING, e.PrefillDone): Move(_P.DRAINING),
        (_P.DRAINING, e.CancelAsked): Move(_P.DRAINING),
        (_P.DRAINING, e.Broken): Move(_P.DRAINING, goal=_P.FAILED),
        (_P.DRAINING, e.Sent): Move(None),
        (_P.DRAINING, e.Stopped): Move(None),
    }
    for state in (_P.RECEIVED, _P.ALLOCATED):
        moves[state, e.CancelAsked] = Move(_P.CANCELLED, _STOPPED)
        moves[state, e.Broken] = Move(_P.FAILED, _STOPPED)
        moves[state, e.Stopped] = Move(_P.FAILED, _STOPPED)  # a fabric port broke
    for state in (_P.PREFILLING, _P.TRANSFERRING):
        moves[state, e.CancelAsked] = Move(_P.DRAINING, (Effect.STOP_WRITES,), goal=_P.CANCELLED)
        moves[state, e.Broken] = Move(_P.DRAINING, (Effect.STOP_WRITES,), goal=_P.FAILED)
        # A write failed by itself: the messenger has stopped and counted already.
        moves[state, e.Stopped] = Move(_P.FAILED, _STOPPED)
    return moves


PREFILL = Table(
    name="prefill side",
    start=_P.RECEIVED,
    start_effects=(Effect.ALLOCATE,),
    moves=_prefill_moves(),
    on_goal={_P.CANCELLED: _STOPPED, _P.FAILED: _STOPPED},
    terminal=frozenset({_P.SENT, _P.REJECTED, _P.CANCELLED, _P.FAILED}),
)


def render(table: Table) -> str:
    """The table as Markdown, in its own order."""
    lines = [
        f"### {table.name.capitalize()}",
        "",
        f"Starts in **{table.start}**, ordering {', '.join(table.start_effects)}. "
        f"Ends in {', '.join(sorted(table.terminal))}.",
        "",
        "| in state | event | next state | orders |",
        "|---|---|---|---|",
    ]
    for (state, event), move in table.moves.items():
        target = "where it was heading" if move.target is None else str(move.target)
        if move.goal is not None:
            target += f", heading for {move.goal}"
        lines.append(f"| {state} | {event.__name__} | {target} | {', '.join(move.effects)} |")
    lines += ["", "At the end of a drain:", "", "| reached | orders |", "|---|---|"]
    lines += [f"| {state} | {', '.join(effects)} |" for state, effects in table.on_goal.items()]
    return "\n".join(lines) + "\n"
