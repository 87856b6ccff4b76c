"""What handing a chunk of 1000 pages to the fabric costs the event loop, before a prefill step may begin.

One call posts all layers of a chunk: `announce` plans it, builds the write and hands it to the port's `write`, whose
last act is to wake the progress thread. Both are timed on a source whose target counts for real, after each handoff has
ended: nothing is warm but what a prefiller keeps warm.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import msgspec

from pdd.bench.transfer import Pair, make_shape
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.port import Write

NUM_PAGES, NUM_LAYERS, PAGE_TOKENS = 1000, 30, 16
WARM_UP_ROUNDS = 3


class Posting(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of each round."""

    write: list[float]
    """In the port's `write`: conversion, checks, the copy that the library makes, and waking its thread."""
    announce: list[float]
    """From MessengerGroup.announce down, `write` included."""

    def text(self) -> str:
        return (
            f"Python cost of one write of {NUM_PAGES} pages, {NUM_LAYERS} layers, p50/p99 us: {_spread(self.write)} in "
            f"the port, {_spread(self.announce)} from its announcement on, n {len(self.write)}"
        )


def _spread(seconds: Sequence[float]) -> str:
    p99 = sorted(seconds)[len(seconds) * 99 // 100]
    return f"{statistics.median(seconds) * 1e6:.0f}/{p99 * 1e6:.0f}"


class TimedPort(LibfabricPort):
    def __init__(self, provider: str, hosts: Sequence[str]) -> None:
        super().__init__(provider, hosts)
        self.write_s: list[float] = []

    def write(self, write: Write) -> None:
        begin_s = time.perf_counter()
        super().write(write)
        self.write_s.append(time.perf_counter() - begin_s)


def measure_posting(provider: str, num_rounds: int) -> Posting:
    """Raises FabricError where handoffs do not arrive."""
    shape = make_shape(1, 1, NUM_PAGES, num_layers=NUM_LAYERS, page_tokens=PAGE_TOKENS, head_dim=16, dtype="bfloat16",
                       num_planes=2)  # fmt: skip
    pair = Pair("posting", provider, shape, shape, NUM_PAGES * PAGE_TOKENS, nics=1, open_port=TimedPort)
    try:
        for _ in range(WARM_UP_ROUNDS + num_rounds):
            pair.seconds()
        [port] = pair.source.ports
        assert isinstance(port, TimedPort)
        return Posting(write=port.write_s[WARM_UP_ROUNDS:], announce=pair.announce_s[WARM_UP_ROUNDS:])
    finally:
        pair.close()
