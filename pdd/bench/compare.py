"""Contenders of `pdd bench fabric` in turn: round r of each, then round r + 1, so that noise hits all alike.

A ratio is a median of the rounds' ratios, each from neighbours in time; rates of different minutes are not compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import msgspec

from pdd.bench.contender import Contender, ContenderFailed, Route, Running
from pdd.bench.machine import Machine
from pdd.bench.peers.pair import Took
from pdd.bench.percentile import percentile
from pdd.bench.posting import Posting

WARM_UP_ROUNDS = 1


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    arena_bytes: int
    """Of one round."""
    page_bytes: list[int]
    num_rounds: int
    latency_page_bytes: list[int]
    num_writes: int
    """Of one page, for the latency, in as many turns as there are rounds."""


class Series(msgspec.Struct, frozen=True, kw_only=True):
    """What one contender did with one size of pages."""

    contender: str
    page_bytes: int
    num_pages: int
    """Of one round; 1: this is about latency."""
    seconds: list[float]
    """One for each round, in order."""
    looped_seconds: list[float] = []
    """Likewise, until an asyncio loop in the target's process had been told; empty for those that have none."""

    @property
    def gigabytes_per_s(self) -> list[float]:
        return [self.num_pages * self.page_bytes / seconds / 1e9 for seconds in self.seconds]

    @property
    def median(self) -> float:
        """GB/s"""
        return statistics.median(self.gigabytes_per_s)

    def percentile_s(self, percent: int) -> float:
        return percentile(self.seconds, percent)


class Ratio(msgspec.Struct, frozen=True):
    """How many times faster ours was."""

    median: float
    low: float
    high: float
    num_rounds: int


class Entrant(msgspec.Struct, frozen=True, kw_only=True):
    contender: Contender
    version: str
    failure: str = ""
    """Why its figures end early."""


class LeftOut(msgspec.Struct, frozen=True):
    name: str
    reason: str


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    plan: Plan
    entrants: list[Entrant]
    left_out: list[LeftOut]
    throughput: list[Series]
    latency: list[Series]
    posting: Posting | None = None
    """pdd's own, without any other process."""

    def names(self, route: Route) -> list[str]:
        return [each.contender.name for each in self.entrants if each.contender.route is route]


def find(series: Sequence[Series], contender: str, page_bytes: int) -> Series | None:
    return next((each for each in series if (each.contender, each.page_bytes) == (contender, page_bytes)), None)


def ratio(ours: Series, peer: Series) -> Ratio:
    """Raises ValueError when they have not moved the same pages as often."""
    if (ours.page_bytes, ours.num_pages) != (peer.page_bytes, peer.num_pages):
        raise ValueError(f"{ours.contender} and {peer.contender} have moved different pages")
    ratios = [theirs_s / ours_s for ours_s, theirs_s in zip(ours.seconds, peer.seconds, strict=True)]
    return Ratio(statistics.median(ratios), min(ratios), max(ratios), len(ratios))


def best(series: Sequence[Series]) -> Series:
    """By its median."""
    return max(series, key=lambda each: each.median)


class Race:
    """Those that still run. One that fails drops out, with all of the size that it failed at, and is closed: it may be
    polling in the others' turns."""

    def __init__(self, runners: Sequence[Running]) -> None:
        self.runners = list(runners)
        self.failures: dict[str, str] = {}

    def series(self, page_bytes: int, num_pages: int, turns: Sequence[int]) -> list[Series]:
        """One turn of each, of so many rounds, and again; the first turn warms up."""
        found: dict[str, list[Took]] = {each.contender.name: [] for each in self.runners}
        for number, count in enumerate((WARM_UP_ROUNDS, *turns)):
            for each in tuple(self.runners):
                took = self._turn(each, page_bytes, num_pages, count)
                if number:
                    found[each.contender.name] += took
        return [
            Series(
                contender=name,
                page_bytes=page_bytes,
                num_pages=num_pages,
                seconds=[each.seconds for each in took],
                looped_seconds=[each.looped_seconds for each in took if each.looped_seconds is not None],
            )
            for name, took in found.items()
            if name not in self.failures
        ]

    def _turn(self, each: Running, page_bytes: int, num_pages: int, count: int) -> list[Took]:
        try:
            return each.turn(page_bytes, num_pages, count)
        except ContenderFailed as error:
            self.failures[each.contender.name] = f"{error} ({num_pages} pages of {page_bytes} bytes)"
            self.runners.remove(each)
            each.close()
            return []


def turns_of(num_writes: int, num_turns: int) -> list[int]:
    """Splits the latency's writes evenly."""
    return [
        num
        for num in (num_writes * (i + 1) // num_turns - num_writes * i // num_turns for i in range(num_turns))
        if num
    ]


def measure(
    runners: Sequence[Running],
    left_out: Sequence[LeftOut],
    machine: Machine,
    plan: Plan,
    progress: Callable[[str], None],
) -> Report:
    race = Race(runners)
    throughput: list[Series] = []
    latency: list[Series] = []
    for page_bytes in plan.page_bytes:
        progress(f"pages of {page_bytes >> 10} KiB")
        throughput += race.series(page_bytes, plan.arena_bytes // page_bytes, [1] * plan.num_rounds)
    for page_bytes in plan.latency_page_bytes:
        progress(f"one page of {page_bytes >> 10} KiB")
        latency += race.series(page_bytes, 1, turns_of(plan.num_writes, plan.num_rounds))
    entrants = [
        Entrant(contender=each.contender, version=each.version, failure=race.failures.get(each.contender.name, ""))
        for each in runners
    ]
    return Report(
        machine=machine, plan=plan, entrants=entrants, left_out=list(left_out), throughput=throughput, latency=latency
    )
