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
