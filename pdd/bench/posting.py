"""What handing a chunk of 1000 pages to the fabric costs the event loop, before a prefill step may begin.

One call posts all layers of a chunk: `announce` plans it, builds the write and hands it to the port's `write`, whose
last act is to wake the progress thread if that sleeps. Both are timed on a source whose target counts for real, after
each handoff has ended: nothing is warm but what a prefiller keeps warm. Once with a thread that sleeps, so that the
kernel's part in waking it is in the figure, and once with one that is awake, as it is while layers go out.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from pdd.bench.percentile import percentile
from pdd.bench.transfer import Pair, make_shape
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.port import Write

NUM_PAGES, NUM_LAYERS, PAGE_TOKENS = 1000, 30, 16
WARM_UP_ROUNDS = 3
AWAKE_US = 100_000
"""Longer than a round: a thread that has just been asked for something spins until it is asked again."""


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each round."""

    write: list[float]
    """In the port's `write`: packing, checks, and the copy that the library makes; its thread is awake."""
    write_waking: list[float]
    """The same where the thread has to be woken."""
    announce_waking: list[float]
    """From MessengerGroup.announce down, `write` included."""

    def text(self) -> str:
        return (
            f"Python cost of one write of {NUM_PAGES} pages, {NUM_LAYERS} layers, p50/p99 us: {_spread(self.write)}; "
            f"{_spread(self.write_waking)} where the progress thread sleeps, {_spread(self.announce_waking)} then from "
            f"its announcement on; n {len(self.write)}"
        )


def _spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds) * 1e6:.0f}/{percentile(seconds, 99) * 1e6:.0f}"


class TimedPort(LibfabricPort):
    spin_us = 0

    def __init__(self, provider: str, hosts: Sequence[str]) -> None:
        super().__init__(provider, hosts, spin_us=self.spin_us)
        self.write_s: list[float] = []

    def write(self, write: Write) -> None:
        begin_s = time.perf_counter()
        super().write(write)
        self.write_s.append(time.perf_counter() - begin_s)


class AwakePort(TimedPort):
    spin_us = AWAKE_US

    def write(self, write: Write) -> None:
        self.peer_info(write.peer)  # returns when the progress thread has answered
        super().write(write)


def measure_posting(provider: str, num_rounds: int) -> Posting:
    """Raises FabricError where handoffs do not arrive."""
    asleep, awake = _rounds(provider, num_rounds, TimedPort), _rounds(provider, num_rounds, AwakePort)
    return Posting(write=awake.write, write_waking=asleep.write, announce_waking=asleep.announce)


class _Rounds(NamedTuple):
    write: list[float]
    announce: list[float]


def _rounds(provider: str, number: int, open_port: type[TimedPort]) -> _Rounds:
    shape = make_shape(1, 1, NUM_PAGES, num_layers=NUM_LAYERS, page_tokens=PAGE_TOKENS, head_dim=16, dtype="bfloat16",
                       num_planes=2)  # fmt: skip
    pair = Pair("posting", provider, shape, shape, NUM_PAGES * PAGE_TOKENS, nics=1, open_port=open_port)
    try:
        for _ in range(WARM_UP_ROUNDS + number):
            pair.seconds()
        [port] = pair.source.ports
        assert isinstance(port, TimedPort)
        return _Rounds(port.write_s[WARM_UP_ROUNDS:], pair.announce_s[WARM_UP_ROUNDS:])
    finally:
        pair.close()
