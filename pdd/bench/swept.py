"""Whatever ends a bench, it leaves nothing behind."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from pdd.fabric.libfabric import SHARED_MEMORY, sweep_dead_endpoints


def _terminated(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)


@contextmanager
def swept() -> Iterator[None]:
    """Whatever ends the bench: its processes close their ports first, and endpoints of killed ones are removed."""
    before = {number: signal.signal(number, _terminated) for number in (signal.SIGTERM, signal.SIGHUP)}
    # Loaded with libfabric, PSM2 takes SIGINT and ends the process on the spot. This takes it back.
    signal.signal(signal.SIGINT, signal.getsignal(signal.SIGINT))
    sweep_dead_endpoints(SHARED_MEMORY)
    try:
        yield
    finally:
        sweep_dead_endpoints(SHARED_MEMORY)
        for number, handler in before.items():
            signal.signal(number, handler)
