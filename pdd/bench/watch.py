"""`pdd bench watch`: from a layer counter's change to the first write of that layer, the handoff's shortest step.

    raiser   stamps, raises the counter, writes the eventfd (the executor's part)
    source   has a write armed on the counter: its port's progress thread sees the change and posts
    target   counts what arrives

Three processes and one clock (CLOCK_MONOTONIC). Twice: with a progress thread that sleeps in poll, and with one that
spins. Between two samples the counter rests, so that a sleeping thread sleeps.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from typing import NamedTuple, Protocol

import msgspec

from pdd.base.ids import Immediate
from pdd.bench.fabric import KIB, End, pieces_of, positive
from pdd.bench.machine import Machine, describe, this_machine
from pdd.bench.peers.pair import Line, socket_lines
from pdd.bench.percentile import percentile
from pdd.bench.swept import swept
from pdd.fabric.immediate import NUM_GENERATIONS, pack
from pdd.fabric.libfabric import PROVIDERS
from pdd.fabric.port import CountReached, Write, WriteDone
from pdd.topology.model import Provider

SPIN_US = 1_000_000
"""Longer than any rest: the progress thread never sleeps."""
WAYS = {"sleeping in poll": 0, "spinning": SPIN_US}
WARM_UP_SAMPLES = 20
GOAL_P50_US, GOAL_P99_US = 10.0, 100.0
US = 1e6


class Sample(NamedTuple):
    raised_s: float
    posted_s: float | None
    """None: the port does not say."""
    arrived_s: float


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """One way, in microseconds after the counter's change, one for each sample in order."""

    way: str
    posted_us: list[float]
    arrived_us: list[float]


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    provider: str
    page_bytes: int
    num_pages: int
    timings: list[Timing]


class Sender(Protocol):
    """A source's port, with a write prepared."""

    def arm(self, number: int) -> None:
        """Posts nothing before the counter is above `number`."""

    def wait(self) -> float | None:
        """When the first message of the armed write was posted, once it is done."""


class Conversation(Protocol):
    def say(self, message: object) -> None: ...

    def hear(self) -> object: ...


class Counter:
    """A layer counter and its eventfd, which the processes of a fork share."""

    def __init__(self) -> None:
        self._map = mmap.mmap(-1, mmap.PAGESIZE)
        self._value = ctypes.c_uint64.from_buffer(self._map)
        self.address = ctypes.addressof(self._value)
        self.wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    @property
    def value(self) -> int:
        return self._value.value

    def raise_one(self) -> float:
        """As an executor does after a layer. Returns time.monotonic() of just before."""
        raised_s = time.monotonic()
        self._value.value += 1
        os.eventfd_write(self.wake_fd, 1)
        return raised_s


class PortSender:
    """Sender over a real port."""

    def __init__(self, end: End, counter: Counter, page_bytes: int, num_pages: int) -> None:
        self._end, self._counter = end, counter
        self._watch = end.port.watch(counter.address, counter.wake_fd)
        self._spec = partial(end.spec, page_bytes=page_bytes, target_pages=range(num_pages))

    def arm(self, number: int) -> None:
        write: Write = self._spec(immediate_of(number))
        self._end.port.write(msgspec.structs.replace(write, watch=self._watch, counter_base=self._counter.value))

    def wait(self) -> float | None:
        return self._end.wait(WriteDone).first_s


def immediate_of(number: int) -> Immediate:
    return pack(1, number % NUM_GENERATIONS)


def take(sender: Sender, raiser: Conversation, target: Conversation, number: int, rest_s: float) -> Sample:
    """One sample: armed on both sides, at rest, raised, posted, arrived."""
    target.say(number)
    target.hear()
    sender.arm(number)
    raiser.say(rest_s)
    raised_s = raiser.hear()
    posted_s = sender.wait()
    arrived_s = target.hear()
    assert isinstance(raised_s, float)
    assert isinstance(arrived_s, float)
    return Sample(raised_s, posted_s, arrived_s)


def timing(way: str, samples: Sequence[Sample]) -> Timing:
    posted = [(each.posted_s - each.raised_s) * US for each in samples if each.posted_s is not None]
    return Timing(way=way, posted_us=posted, arrived_us=[(each.arrived_s - each.raised_s) * US for each in samples])


# Processes.


def _serve_raiser(counter: Counter, line: Line) -> None:
    while True:
        time.sleep(line.hear())
        line.say(counter.raise_one())


def _serve_target(provider: str, arena_bytes: int, num_pieces: int, line: Line) -> None:
    with closing(End(provider, arena_bytes, line)) as end:
        while True:
            end.port.expect(immediate_of(line.hear()), num_pieces)
            line.say("armed")
            line.say(end.wait(CountReached).first_s)


@contextmanager
def _child(serve: Callable[[Line], None]) -> Iterator[Line]:
    """Forked before libfabric is opened on this side, which does not survive a fork. Ends when its line is closed."""
    ours, theirs = socket_lines()
    pid = os.fork()
    if not pid:
        ours.close()
        try:
            serve(theirs)
        finally:  # whatever it died of, the parent sees the end of the line
            os._exit(0)
    theirs.close()
    try:
        yield ours
    finally:
        ours.close()
        os.waitpid(pid, 0)


def measure(arguments: argparse.Namespace) -> tuple[str, list[Timing]]:
    """The provider that was opened, and both ways. Raises FabricUnavailable."""
    page_bytes, num_pages = arguments.page_kib * KIB, arguments.pages
    arena_bytes, rest_s = page_bytes * num_pages, arguments.rest_ms / 1000
    serve_target = partial(_serve_target, arguments.provider, arena_bytes, num_pages * len(pieces_of(page_bytes)))
    provider, timings = "", []
    with swept(), ExitStack() as stack:
        counter = Counter()
        raiser = stack.enter_context(_child(partial(_serve_raiser, counter)))
        targets = [stack.enter_context(_child(serve_target)) for _ in WAYS]
        for (way, spin_us), target in zip(WAYS.items(), targets, strict=True):
            with closing(End(arguments.provider, arena_bytes, target, spin_us)) as end:
                provider = end.name
                sender = PortSender(end, counter, page_bytes, num_pages)
                numbers = range(WARM_UP_SAMPLES + arguments.samples)
                samples = [take(sender, raiser, target, number, rest_s) for number in numbers]
                timings.append(timing(way, samples[WARM_UP_SAMPLES:]))
    return provider, timings


# What the user sees.


def _row(name: str, values: Sequence[float]) -> str:
    p50, p99 = statistics.median(values), percentile(values, 99)
    return f"  {name:34} {p50:>8.1f} {p99:>8.1f} {max(values):>8.1f} {len(values):>6}"


def table(report: Report) -> Iterator[str]:
    size = f"{report.num_pages} pages of {report.page_bytes // KIB} KiB"
    yield f"{report.provider}, {size}; microseconds after the layer counter's change:"
    yield f"  {'':34} {'p50':>8} {'p99':>8} {'max':>8} {'n':>6}"
    for each in report.timings:
        if each.posted_us:
            yield _row(f"{each.way}: first write posted", each.posted_us)
        yield _row(f"{each.way}: first page arrived", each.arrived_us)
    for each in report.timings:
        if each.posted_us:
            met = statistics.median(each.posted_us) < GOAL_P50_US and percentile(each.posted_us, 99) < GOAL_P99_US
            goal = f"p50 below {GOAL_P50_US:.0f} us and p99 below {GOAL_P99_US:.0f} us"
            yield f"  {each.way}: {goal}: {'yes' if met else 'no'}"
        else:
            yield f"  {each.way}: this port does not say when it posted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", default=PROVIDERS[Provider.TCP], metavar="NAME",
                        help="libfabric's names in order of choice, joined by commas")  # fmt: skip
    parser.add_argument("--page-kib", type=positive, default=32, metavar="KIB")
    parser.add_argument("--pages", type=positive, default=16, metavar="N", help="of one layer")
    parser.add_argument("--samples", type=positive, default=1000, metavar="N", help="of each way")
    parser.add_argument("--rest-ms", type=positive, default=2, metavar="MS", help="before each change of the counter")
    parser.add_argument("--json", action="store_true", help="machine-readable, with every sample")


def run(arguments: argparse.Namespace) -> int:
    """0: measured. Raises FabricUnavailable."""
    machine = this_machine()
    provider, timings = measure(arguments)
    report = Report(
        machine=machine,
        provider=provider,
        page_bytes=arguments.page_kib * KIB,
        num_pages=arguments.pages,
        timings=timings,
    )
    if arguments.json:
        print(msgspec.json.encode(report).decode())
        return 0
    print(describe(machine))
    print(*table(report), sep="\n")
    return 0
