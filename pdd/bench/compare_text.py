"""What `pdd bench fabric` prints."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from pdd.bench.compare import Ratio, Report, Series, best, find, ratio
from pdd.bench.contender import Route
from pdd.bench.percentile import percentile

KIB, MIB = 1 << 10, 1 << 20
PAGE_WIDTH, CELL_WIDTH = 9, 19
OURS = "pdd "
"""How names of pdd's own contenders begin."""


def _size(page_bytes: int) -> str:
    return f"{page_bytes // KIB} KiB"


def alone(report: Report) -> Iterator[str]:
    """A table for each contender."""
    for each in report.entrants:
        name = each.contender.name
        yield (
            f"{each.version}; {report.plan.arena_bytes // MIB} MiB a round in shuffled pages; "
            "until the target has counted every page:"
        )
        yield f"  {'page':>9}  {'GB/s':>6}  {'min - max':>13}  {'pages/s':>9}  {'rounds':>6}"
        for row in (row for row in report.throughput if row.contender == name):
            rates = row.gigabytes_per_s
            spread, pages_per_s = f"{min(rates):.2f} - {max(rates):.2f}", row.median * 1e9 / row.page_bytes
            yield (
                f"  {_size(row.page_bytes):>9}  {row.median:>6.2f}  {spread:>13}  {pages_per_s:>9.0f}  {len(rates):>6}"
            )
        yield (
            "  one page, p50/p99 us from the call until counted, and until an asyncio loop in the target's process was "
            "told:"
        )
        for row in (row for row in report.latency if row.contender == name):
            yield f"  {_size(row.page_bytes):>9}  {_latency(row):>9}  {_looped(row)}  n {len(row.seconds)}"
    yield from problems(report)


def beside(report: Report) -> Iterator[str]:
    """For each route: rates, latencies, and ratios of pdd to each peer."""
    plan = report.plan
    yield (
        f"{plan.arena_bytes // MIB} MiB a round in shuffled pages, {plan.num_rounds} rounds of each in turn, after one "
        "that warms up; until the target knows that all pages are there"
    )
    for each in report.entrants:
        yield f"  {each.contender.name}: {each.version}"
    yield from (f"  {note}" for note in dict.fromkeys(each.contender.note for each in report.entrants) if note)
    for route in Route:
        names = report.names(route)
        if names:
            yield ""
            yield f"GB/s {route.value}, median (min-max):"
            yield from _table(
                names, [(size, [_rate(report, name, size) for name in names]) for size in plan.page_bytes]
            )
            yield from _ratios(report, names)
            yield f"one page {route.value}, p50/p99 us, n {plan.num_writes}:"
            rows = [(size, [_latency(find(report.latency, name, size)) for name in names])
                    for size in plan.latency_page_bytes]  # fmt: skip
            yield from _table(names, rows)
    yield from problems(report)


def problems(report: Report) -> Iterator[str]:
    yield from (f"left out: {each.name}: {each.reason}" for each in report.left_out)
    yield from (f"failed: {each.contender.name}: {each.failure}" for each in report.entrants if each.failure)


def _table(names: Sequence[str], rows: Sequence[tuple[int, Sequence[str]]]) -> Iterator[str]:
    yield "  " + f"{'page':>{PAGE_WIDTH}}" + "".join(f"{name:>{CELL_WIDTH + 1}}" for name in names)
    for page_bytes, cells in rows:
        yield "  " + f"{_size(page_bytes):>{PAGE_WIDTH}}" + "".join(f"{cell:>{CELL_WIDTH + 1}}" for cell in cells)


def _rate(report: Report, name: str, page_bytes: int) -> str:
    series = find(report.throughput, name, page_bytes)
    if series is None:
        return "-"
    return f"{series.median:.2f} ({min(series.gigabytes_per_s):.2f}-{max(series.gigabytes_per_s):.2f})"


def _latency(series: Series | None) -> str:
    return (
        "-" if series is None else f"{statistics.median(series.seconds) * 1e6:.0f}/{series.percentile_s(99) * 1e6:.0f}"
    )


def _looped(series: Series) -> str:
    """The last figure is the median of the writes' own ratios."""
    if not series.looped_seconds:
        return "-"
    both = zip(series.looped_seconds, series.seconds, strict=True)
    times = statistics.median(looped / plain for looped, plain in both)
    p50, p99 = statistics.median(series.looped_seconds), percentile(series.looped_seconds, 99)
    return f"{f'{p50 * 1e6:.0f}/{p99 * 1e6:.0f}':>9}  {times:.2f} times as long"


def _ratio(value: Ratio) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _ratios(report: Report, names: Sequence[str]) -> Iterator[str]:
    """One table for each of pdd's own: peers in columns, and the best configuration of NIXL last."""
    peers = [name for name in names if not name.startswith(OURS)]
    for ours in (name for name in names if name.startswith(OURS)):
        if not peers:
            return
        yield f"{ours} / peer, median of the rounds' ratios (min-max), n {report.plan.num_rounds}:"
        rows = []
        for size in report.plan.page_bytes:
            found = find(report.throughput, ours, size)
            others = [find(report.throughput, peer, size) for peer in peers]
            cells = ["-" if found is None or other is None else _ratio(ratio(found, other)) for other in others]
            rows.append((size, [*cells, _best_nixl(found, [other for other in others if other is not None])]))
        yield from _table([*peers, "best NIXL"], rows)


def _best_nixl(ours: Series | None, peers: Sequence[Series]) -> str:
    nixl = [each for each in peers if each.contender.startswith("nixl")]
    if ours is None or not nixl:
        return "-"
    winner = best(nixl)
    return f"{ratio(ours, winner).median:.2f} {winner.contender.removeprefix('nixl-')}"
