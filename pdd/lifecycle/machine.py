"""One request's state on one side: apply(event) -> effects, and the story of how it got there.

Pure: time is passed in, nothing is awaited, sent or freed here. An event that the table does not allow raises
IllegalEvent with the story so far and changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdd.base.errors import IllegalEvent
from pdd.base.ids import RequestId
from pdd.lifecycle.events import Broken, Effect, Event
from pdd.lifecycle.request import ErrorInfo
from pdd.lifecycle.table import State, Table


class StoryEntry(msgspec.Struct, frozen=True):
    at_s: float
    state: State
    reason: str


class Machine:
    """The only holder of a request's state. One for each side that a request has on this node."""

    def __init__(self, table: Table, request: RequestId, now_s: float, reason: str = "") -> None:
        self.request = request
        self.state: State = table.start
        self.error: ErrorInfo | None = None
        """What the client is to be told; set by the event that broke the request."""
        self.story: list[StoryEntry] = [StoryEntry(now_s, table.start, reason)]
        self._table = table
        self._goal: State | None = None

    @property
    def terminal(self) -> bool:
        return self.state in self._table.terminal

    @property
    def ending(self) -> bool:
        """True once the client has been (or is being) told the end: only pages may still be busy."""
        return self.terminal or self._goal in self._table.terminal

    @property
    def start_effects(self) -> Sequence[Effect]:
        return self._table.start_effects

    def allows(self, event: type[Event]) -> bool:
        return (self.state, event) in self._table.moves

    def apply(self, event: Event, now_s: float) -> Sequence[Effect]:
        """Moves on and returns what is to be done, in order. Raises IllegalEvent and changes nothing."""
        move = self._table.moves.get((self.state, type(event)))
        if move is None:
            raise IllegalEvent(
                f"{self._table.name} of {self.request}: {type(event).__name__} ({event.reason or 'no reason'}) "
                f"is not allowed in state {self.state}; story: {self.tell()}"
            )
        if isinstance(event, Broken) and not self.ending:
            self.error = event.error
        effects = move.effects
        if move.target is None:
            assert self._goal is not None, self.tell()  # only a move with a goal leads into a drain
            self.state, self._goal = self._goal, None
            effects = (*effects, *self._table.on_goal[self.state])
        elif move.goal is not None and self.ending:
            effects = ()  # the first reason to end stands, and the client has been told
        else:
            self.state = move.target
            self._goal = move.goal or self._goal
        self.story.append(StoryEntry(now_s, self.state, event.reason or type(event).__name__))
        return effects

    def seconds_in(self, now_s: float) -> dict[State, float]:
        """Time spent in each state so far; terminal states take none."""
        spent: dict[State, float] = {}
        for entry, following in zip(self.story, [*self.story[1:], None], strict=True):
            if entry.state in self._table.terminal:
                continue
            end_s = now_s if following is None else following.at_s
            spent[entry.state] = spent.get(entry.state, 0.0) + end_s - entry.at_s
        return spent

    def entered_s(self, state: State) -> float | None:
        """When the state was first entered; None if never."""
        return next((entry.at_s for entry in self.story if entry.state == state), None)

    def tell(self) -> str:
        """The story on one line."""
        start_s = self.story[0].at_s
        return "; ".join(f"+{entry.at_s - start_s:.3f}s {entry.state} ({entry.reason})" for entry in self.story)
