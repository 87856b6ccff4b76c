"""The picture of `pdd bench fabric --plot`: GB/s and pages/s over page size, and the latency of one page.

matplotlib is optional and loaded only here, when a picture is asked for.
"""

from __future__ import annotations

import importlib
import importlib.util
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pdd.base.errors import OperatorError
from pdd.bench.compare import Report, Series

KIB = 1 << 10
INCHES, DOTS_PER_INCH = (15, 5), 120
BAR_SPACE = 0.8
"""Of the distance between two groups of bars."""


def check_plot(path: Path) -> None:
    """Raises OperatorError before anything is measured for a picture that could not be drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise OperatorError("--plot needs matplotlib, which is not installed: pip install pdd[plot], or use --json")
    if not path.parent.is_dir():
        raise OperatorError(f"--plot {path}: there is no directory {path.parent}")
    formats = _figure().canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise OperatorError(f"--plot {path}: its ending is none of {', '.join(sorted(formats))}")
    _check_writable(path)


def _check_writable(path: Path) -> None:
    existed = path.exists()
    if existed and not path.is_file():
        raise OperatorError(f"--plot {path}: there is something else than a file")
    try:
        path.open("ab").close()
    except OSError as error:
        raise OperatorError(f"--plot {path} cannot be written: {error.strerror}") from error
    if not existed:
        path.unlink()


def _figure(**options: Any) -> Any:
    return importlib.import_module("matplotlib.figure").Figure(**options)  # no pyplot: no display is looked for


def plot(report: Report, path: Path) -> None:
    """Writes the picture, in the format of the path's ending. Raises OperatorError when the file takes nothing."""
    figure = _figure(figsize=INCHES, layout="constrained")
    rates, pages, latency = figure.subplots(1, 3)
    names = [each.contender.name for each in report.entrants]
    for name in names:
        rows = [each for each in report.throughput if each.contender == name]
        sizes = [row.page_bytes / KIB for row in rows]
        medians = [row.median for row in rows]
        below = [row.median - min(row.gigabytes_per_s) for row in rows]
        above = [max(row.gigabytes_per_s) - row.median for row in rows]
        rates.errorbar(sizes, medians, yerr=[below, above], marker="o", capsize=3, label=name)
        pages.plot(sizes, [row.median * 1e9 / row.page_bytes for row in rows], marker="o", label=name)
    ticks = [size // KIB for size in report.plan.page_bytes]
    for axes, label in ((rates, "GB/s (median, min to max)"), (pages, "pages/s (median)")):
        axes.set(xscale="log", xlabel="page, KiB", ylabel=label)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xticks([], minor=True)
        axes.grid(visible=True, alpha=0.3)
    pages.set_yscale("log")
    _bars(latency, report.latency, names)
    figure.legend(*rates.get_legend_handles_labels(), loc="outside lower center", ncols=len(names), fontsize="small")
    figure.suptitle(f"{report.machine.num_cores} cores of {report.machine.processor}, Linux {report.machine.kernel}")
    try:
        figure.savefig(path, dpi=DOTS_PER_INCH)
    except OSError as error:
        raise OperatorError(f"--plot {path} cannot be written: {error.strerror}") from error


def _bars(axes: Any, latency: Sequence[Series], names: Sequence[str]) -> None:
    """A group for each page size, a bar to p50 for each contender, and a line from there to p99."""
    sizes = sorted({row.page_bytes for row in latency})
    width = BAR_SPACE / max(1, len(names))
    for number, name in enumerate(names):
        rows = [row for row in latency if row.contender == name]
        places = [sizes.index(row.page_bytes) + number * width for row in rows]
        medians = [statistics.median(row.seconds) * 1e6 for row in rows]
        above = [max(0.0, row.percentile_s(99) * 1e6 - median) for row, median in zip(rows, medians, strict=True)]
        axes.bar(places, medians, width, yerr=[[0.0] * len(rows), above], capsize=2, label=name)
    middle = BAR_SPACE / 2 - width / 2
    axes.set_xticks([number + middle for number in range(len(sizes))], [f"{size // KIB} KiB" for size in sizes])
    axes.set(yscale="log", ylabel="one page, us (bar p50, line to p99)")
    axes.grid(visible=True, axis="y", alpha=0.3)
