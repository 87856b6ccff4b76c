"""Prefillers whose pages do not arrive although their links live: they are left out, the longer the more often.

A handoff whose writes fail costs its request seconds. After two in a row nobody asks that prefiller for 1 s, 2 s, ...
30 s; then one request finds out whether pages arrive again.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdd.base.ids import Incarnation, NodeName, ReplicaName, is_of

FAILURES = 2
"""In a row, before a prefiller is left out."""
FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 30.0


class Path(msgspec.Struct):
    """From a prefiller, in one life of its node, into a decode replica of ours. It has failed and not worked since."""

    incarnation: Incarnation
    num_failures: int = 0
    reason: str = ""
    retry_at_s: float = 0.0

    @property
    def broken(self) -> bool:
        return self.num_failures >= FAILURES

    @property
    def pause_s(self) -> float:
        return min(FIRST_PAUSE_S * 2.0 ** min(self.num_failures - FAILURES, 10), MAX_PAUSE_S)


class Paths:
    def __init__(self) -> None:
        self._paths: dict[tuple[ReplicaName, ReplicaName], Path] = {}
        """By our replica and theirs."""

    def forget(self, node: NodeName, incarnation: Incarnation) -> None:
        """The node lives in that incarnation now: nothing is held against it for an earlier one."""
        for key, path in list(self._paths.items()):
            if is_of(key[1], node) and path.incarnation != incarnation:
                del self._paths[key]

    def failed(
        self, ours: ReplicaName, theirs: ReplicaName, incarnation: Incarnation, reason: str, now_s: float
    ) -> None:
        """Writes of a handoff got lost."""
        path = self._paths.setdefault((ours, theirs), Path(incarnation))
        path.num_failures += 1
        path.reason = reason
        path.retry_at_s = now_s + path.pause_s

    def worked(self, ours: ReplicaName, theirs: ReplicaName) -> None:
        self._paths.pop((ours, theirs), None)

    def rests(self, ours: ReplicaName, theirs: ReplicaName, now_s: float) -> bool:
        path = self._paths.get((ours, theirs))
        return path is not None and path.broken and now_s < path.retry_at_s

    def tried(self, ours: ReplicaName, theirs: ReplicaName, now_s: float) -> None:
        """A handoff begins. Over a broken path it is the only one until the next pause is over."""
        path = self._paths.get((ours, theirs))
        if path is not None and path.broken:
            path.retry_at_s = now_s + path.pause_s

    def broken(self) -> Iterator[tuple[ReplicaName, str]]:
        """Prefillers from which no pages arrive in some replica of ours, and why."""
        for (ours, theirs), path in self._paths.items():
            if path.broken:
                yield theirs, f"pages do not arrive from {theirs} in {ours}: {path.reason}"
