"""`pdd bench fabric`: what the handoff's third step, moving KV pages, costs on this machine.

Two processes, each with a port and an arena on huge pages. The source writes all pages of its arena to shuffled places
of the target's; a round ends when the target has counted every page, not when the source is told that it is done.

    source --- "write round 3" <--- target       one line of JSON each way
    source === pages ============> target        clocks: CLOCK_MONOTONIC is one for both processes
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import random
import select
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

import msgspec

from pdd.base.errors import FabricUnavailable
from pdd.base.ids import Immediate
from pdd.bench.machine import Machine, describe, this_machine
from pdd.fabric.immediate import NUM_GENERATIONS, pack
from pdd.fabric.libfabric import PROVIDERS, LibfabricPort
from pdd.fabric.port import CountReached, Piece, ProviderInfo, Token, Write, WriteDone
from pdd.memory.arena import SharedMemory
from pdd.topology.model import Provider

KIB, MIB = 1 << 10, 1 << 20
HUGE_PAGE_BYTES = 2 * MIB
PATIENCE_S = 30.0
WARM_UP_ROUNDS = 1
COPY = "copy"
"""Stands among the providers for the way that two processes of one machine take."""


class Throughput(msgspec.Struct, frozen=True, kw_only=True):
    page_bytes: int
    num_pages: int
    gigabytes_per_s: list[float]
    """One for each round, in order."""

    @property
    def median(self) -> float:
        return statistics.median(self.gigabytes_per_s)


class Latency(msgspec.Struct, frozen=True, kw_only=True):
    """From the call of `write` for one page until the target's count, in seconds."""

    page_bytes: int
    num_writes: int
    p50_s: float
    p99_s: float


class ProviderResult(msgspec.Struct, frozen=True, kw_only=True):
    way: str
    """A provider, or `copy`."""
    provider: ProviderInfo
    arena_bytes: int
    throughput: list[Throughput]
    latency: list[Latency]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    results: list[ProviderResult]


# Two processes and the lines between them.


class Line:
    """One side of a conversation in JSON lines."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file: TextIO = end.makefile("rw", encoding="utf-8")

    def say(self, message: object) -> None:
        print(msgspec.json.encode(message).decode(), file=self._file, flush=True)

    def hear(self) -> Any:
        text = self._file.readline()
        if not text:
            raise EOFError("the other process has ended")
        return msgspec.json.decode(text)

    def close(self) -> None:
        self._file.close()
        self._end.close()


class Arena:
    """Anonymous memory that begins on a huge page."""

    fd = -1

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)
        self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        ctypes.memset(self.address, 1, num_bytes)


class SharedArena:
    """A memfd, as executors make them: what a peer of this machine can map."""

    def __init__(self, num_bytes: int) -> None:
        self._memory = SharedMemory(SharedMemory.make_fd("pdd-bench", num_bytes), num_bytes)
        self.fd, self.address = self._memory.fd, self._memory.address
        ctypes.memset(self.address, 1, num_bytes)


class End:
    """One process's port and arena, and the peer's once they have met."""

    def __init__(self, provider: str, arena_bytes: int, line: Line) -> None:
        copies = provider == COPY
        self.port = LibfabricPort(PROVIDERS[Provider.TCP] if copies else provider, copies=copies)
        self.arena = SharedArena(arena_bytes) if copies else Arena(arena_bytes)
        self.arena_bytes = arena_bytes
        self.memory = self.port.register(self.arena.address, arena_bytes, self.arena.fd)
        line.say(self.memory.address.hex())
        self.peer = self.port.add_peer(bytes.fromhex(line.hear()))

    def spec(self, immediate: Immediate, page_bytes: int, target_pages: tuple[int, ...]) -> Write:
        return Write(
            token=Token(immediate),
            peer=self.peer,
            memory=self.memory.memory,
            immediate=immediate,
            num_layers=1,
            source_base=self.arena.address,
            source_layer_bytes=self.arena_bytes,
            source_page_bytes=page_bytes,
            target_base=0,
            target_layer_bytes=self.arena_bytes,
            target_page_bytes=page_bytes,
            source_pages=tuple(range(len(target_pages))),
            target_pages=target_pages,
            pieces=(Piece(0, 0, page_bytes),),
        )

    def wait(self, kind: type[CountReached] | type[WriteDone]) -> CountReached | WriteDone:
        """The next event of a kind."""
        while select.select([self.port], [], [], PATIENCE_S)[0]:
            for event in self.port.events():
                if isinstance(event, kind):
                    return event
        raise TimeoutError(f"no {kind.__name__} within {PATIENCE_S:.0f} s")


def _serve_source(line: Line, provider: str, arena_bytes: int) -> None:
    """The other process: writes what the target asks for and tells when it began, until the line is closed."""
    end = End(provider, arena_bytes, line)
    while True:
        immediate, page_bytes, num_pages, seed = line.hear()
        pages = random.Random(seed).sample(range(num_pages), num_pages)  # noqa: S311 (a shuffle, no secret)
        spec = end.spec(immediate, page_bytes, tuple(pages))
        line.say(time.monotonic())
        start_s = time.monotonic()
        end.port.write(spec)
        end.wait(WriteDone)
        line.say(start_s)


@contextmanager
def _source_process(provider: str, arena_bytes: int) -> Iterator[Line]:
    """Forks before libfabric is opened on either side: it does not survive a fork."""
    ours, theirs = socket.socketpair()
    pid = os.fork()
    if not pid:
        ours.close()
        try:
            _serve_source(Line(theirs), provider, arena_bytes)
        except (EOFError, FabricUnavailable, TimeoutError):
            os._exit(0)
        finally:
            os._exit(1)
    theirs.close()
    line = Line(ours)
    try:
        yield line
    finally:
        line.close()
        os.waitpid(pid, 0)


class Meter:
    """The target's side: asks for rounds and reads the clock when they have been counted."""

    def __init__(self, provider: str, arena_bytes: int, line: Line) -> None:
        self.end = End(provider, arena_bytes, line)
        self._line = line
        self._round = 0

    def seconds(self, page_bytes: int, num_pages: int) -> float:
        immediate = pack(1, self._round % NUM_GENERATIONS)
        self._round += 1
        self.end.port.expect(immediate, num_pages)
        self._line.say([immediate, page_bytes, num_pages, self._round])
        self._line.hear()  # it has made its list
        reached = self.end.wait(CountReached)
        start_s: float = self._line.hear()
        assert isinstance(reached, CountReached)
        return reached.last_s - start_s

    def throughput(self, page_bytes: int, num_rounds: int) -> Throughput:
        num_pages = self.end.arena_bytes // page_bytes
        rounds = [self.seconds(page_bytes, num_pages) for _ in range(WARM_UP_ROUNDS + num_rounds)][WARM_UP_ROUNDS:]
        rates = [num_pages * page_bytes / seconds / 1e9 for seconds in rounds]
        return Throughput(page_bytes=page_bytes, num_pages=num_pages, gigabytes_per_s=rates)

    def latency(self, page_bytes: int, num_writes: int) -> Latency:
        times = sorted(self.seconds(page_bytes, 1) for _ in range(num_writes))
        p99_s = times[min(num_writes - 1, round(0.99 * num_writes))]
        return Latency(page_bytes=page_bytes, num_writes=num_writes, p50_s=statistics.median(times), p99_s=p99_s)


def measure_provider(provider: str, arguments: argparse.Namespace) -> ProviderResult:
    """Raises FabricUnavailable when the provider cannot be opened."""
    arena_bytes = arguments.arena_mib * MIB
    with _source_process(provider, arena_bytes) as line:
        meter = Meter(provider, arena_bytes, line)
        result = ProviderResult(
            way=COPY if provider == COPY else meter.end.port.info.provider,
            provider=meter.end.port.info,
            arena_bytes=arena_bytes,
            throughput=[meter.throughput(size * KIB, arguments.rounds) for size in arguments.page_kib],
            latency=[meter.latency(size * KIB, arguments.writes) for size in arguments.latency_kib],
        )
        meter.end.port.close()
    return result


# What the user sees.


def _table(result: ProviderResult) -> Iterator[str]:
    info = result.provider
    yield (
        f"{result.way} (libfabric {info.library_version}), {result.arena_bytes // MIB} MiB a round in shuffled "
        f"pages, up to {info.pages_per_write} pages a write; until the target has counted every page:"
    )
    yield f"  {'page':>9}  {'GB/s':>6}  {'min - max':>13}  {'pages/s':>9}  {'rounds':>6}"
    for row in result.throughput:
        low, high, rounds = min(row.gigabytes_per_s), max(row.gigabytes_per_s), len(row.gigabytes_per_s)
        pages_per_s = row.median * 1e9 / row.page_bytes
        size, spread = f"{row.page_bytes // KIB} KiB", f"{low:.2f} - {high:.2f}"
        yield f"  {size:>9}  {row.median:>6.2f}  {spread:>13}  {pages_per_s:>9.0f}  {rounds:>6}"
    yield "  one page, from the call until counted (one monotonic clock for both processes):"
    for each in result.latency:
        yield (
            f"  {each.page_bytes // KIB:>5} KiB  p50 {each.p50_s * 1e6:.0f} us  p99 {each.p99_s * 1e6:.0f} us  "
            f"n {each.num_writes}"
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", nargs="+", default=["net,tcp", "shm", COPY], metavar="NAME",
                        help="libfabric's names; joined by commas: the first that there is; or copy")  # fmt: skip
    parser.add_argument("--page-kib", nargs="+", type=int, default=[4, 16, 32, 64, 256, 1024], metavar="KIB")
    parser.add_argument("--latency-kib", nargs="+", type=int, default=[4, 64], metavar="KIB")
    parser.add_argument("--arena-mib", type=int, default=256, metavar="MIB", help="bytes of one round")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each size, after one that warms up")
    parser.add_argument("--writes", type=int, default=500, help="writes of one page for the latency")
    parser.add_argument("--json", action="store_true", help="machine-readable, with every round")


def run(arguments: argparse.Namespace) -> int:
    """0: measured. 1: a provider could not be opened."""
    machine = this_machine()
    results = []
    for provider in arguments.provider:
        try:
            results.append(measure_provider(provider, arguments))
        except FabricUnavailable as error:
            print(f"pdd bench fabric: {error}", file=sys.stderr)
            return 1
    if arguments.json:
        print(msgspec.json.encode(Report(machine=machine, results=results)).decode())
        return 0
    print(describe(machine))
    for result in results:
        print(*_table(result), sep="\n")
    return 0
