"""Of samples that a bench took: the one way in which all of them read a percentile."""

from __future__ import annotations

from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float:
    """One of the values: the first that no more than so many percent of them are below. `values`: at least one."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(percent / 100 * len(ordered)))]
