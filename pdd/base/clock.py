"""Time as a value that is passed in, so that machines and tests never read a clock of their own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    def now_s(self) -> float:
        """Seconds of a monotonic clock; only differences mean anything."""
        ...


class MonotonicClock:
    def now_s(self) -> float:
        return time.monotonic()


class ManualClock:
    """A clock that moves only when told to."""

    def __init__(self, start_s: float = 0.0) -> None:
        self._now_s = start_s

    def now_s(self) -> float:
        return self._now_s

    def advance(self, seconds: float) -> None:
        if seconds < 0:
            raise ValueError(f"time does not run backwards: {seconds} s")
        self._now_s += seconds
