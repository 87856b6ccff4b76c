"""What both sides of a request share: the one loop in which its state moves.

Everything that happens to requests goes through `Side.feed`: one event after another, each applied by the request's
machine, its effects performed at once. An effect that brings about another event queues it behind; nothing re-enters.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec
import structlog

from pdd.base.clock import Clock
from pdd.base.errors import IllegalEvent, InvariantBroken
from pdd.base.ids import Incarnation, NodeName, RequestId
from pdd.daemon.metrics import Metrics
from pdd.daemon.peers import PeerBook
from pdd.daemon.records import Record
from pdd.daemon.stories import Stories
from pdd.lifecycle.events import Effect, Event, PagesAllocated, broken
from pdd.memory.pool import Allocation
from pdd.wire.messages import Message

log = structlog.get_logger(__name__)


class Control(msgspec.Struct, frozen=True):
    """What a side may use of its node."""

    clock: Clock
    metrics: Metrics
    stories: Stories
    peers: PeerBook
    incarnation: Incarnation
    send: Callable[[NodeName, Message], bool]
    """False when the link to that node is not up."""
    fence: Callable[[NodeName, str], None]
    """Cuts the link to a peer that does not answer: its memory keys are closed and it must say hello again."""
    pair: Callable[[NodeName], None]
    """Grants a peer anew whose memory keys were closed over a living link."""


R = TypeVar("R", bound=Record)


class Side(Generic[R]):
    """The requests of one replica on one side."""

    def __init__(self, control: Control) -> None:
        self.control = control
        self.records: dict[RequestId, R] = {}
        self.idle = asyncio.Event()
        """Set while there are none."""
        self.idle.set()
        self._events: deque[tuple[R, Event]] = deque()
        self._feeding = False

    def begin(self, record: R) -> None:
        """Takes a request in: performs what its first state orders."""
        self.records[record.id] = record
        self.idle.clear()
        self._count_state(record, +1)
        for effect in record.machine.start_effects:
            self.perform(effect, record)

    def feed(self, record: R, event: Event) -> None:
        """Applies an event and all that follows from it before it returns; queues it when called from an effect."""
        self._events.append((record, event))
        if self._feeding:
            return
        self._feeding = True
        try:
            while self._events:
                self._turn(*self._events.popleft())
        finally:
            self._feeding = False

    def _turn(self, record: R, event: Event) -> None:
        machine = record.machine
        if machine.terminal:
            return  # e.g. cancelled by an earlier event of the same batch: the end stands
        self._count_state(record, -1)
        try:
            effects = machine.apply(event, self.control.clock.now_s())
        except IllegalEvent as error:
            self._bug(error)
            effects = ()
        if machine.terminal:
            self._end(record)
        else:
            self._count_state(record, +1)
        for effect in effects:
            try:
                self.perform(effect, record)
            except InvariantBroken as error:
                self._bug(error)
                if not machine.ending:  # it alone pays for it
                    self._events.append((record, broken(error)))

    def _bug(self, error: InvariantBroken) -> None:
        self.control.metrics.broken_invariants.inc()
        log.error("broken invariant", error=str(error), exc_info=error)

    def give_pages(self, record: R, allocation: Allocation) -> None:
        """Its turn has come."""
        record.allocation = allocation
        self.feed(record, PagesAllocated(f"{record.num_pages} pages, {record.num_cached_tokens} tokens cached"))

    def perform(self, effect: Effect, record: R) -> None:
        """Carries out one order. Must bring about its event, now or later, or none if the order has no answer."""
        raise NotImplementedError

    def _count_state(self, record: R, change: int) -> None:
        self.control.metrics.requests_in_state.labels(record.side, record.machine.state).inc(change)

    def _end(self, record: R) -> None:
        del self.records[record.id]
        if not self.records:
            self.idle.set()
        metrics, now_s = self.control.metrics, self.control.clock.now_s()
        metrics.requests_ended.labels(record.side, record.machine.state).inc()
        for state, seconds in record.machine.seconds_in(now_s).items():
            metrics.request_state.labels(record.side, state).observe(seconds)
        self.control.stories.ended(record, now_s)
        log.info("request ended", request=record.id, side=record.side, state=str(record.machine.state),
                 reason=record.machine.story[-1].reason)  # fmt: skip
