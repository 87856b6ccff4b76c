"""While a daemon serves: its books are looked over by its invariant checkers, one replica set at a time, seldom.

The tests look after everything that they do, and `pdctl kv` when it is asked. This is for the contradiction that only
weeks of real traffic bring about: it is counted and logged while whoever caused it may still be found in the log.
"""

from __future__ import annotations

import asyncio
import time

import structlog

from pdd.base.ids import ReplicaName
from pdd.daemon.node import Node

log = structlog.get_logger(__name__)

EVERY_S = 10.0
MAX_SHARE = 0.001
"""Of the event loop's time: a look walks the whole pool, and nothing else moves meanwhile."""


class Audit:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._rest_s = EVERY_S
        self._num_looks = 0
        self._told: dict[ReplicaName, set[str]] = {}
        """Of each set what was found the last time; it is told once."""

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(self._rest_s)
            self.look()

    def look(self) -> None:
        """At the set whose turn it is, if there is any."""
        names = list(self._node.replicas)
        if not names:
            return
        name = names[self._num_looks % len(names)]
        replica = self._node.replicas[name]
        self._num_looks += 1
        began_s = time.monotonic()
        problems = set(replica.problems())
        self._rest_s = max(EVERY_S, (time.monotonic() - began_s) / MAX_SHARE)
        new = problems - self._told.get(name, set())
        self._told = {**{it: told for it, told in self._told.items() if it in names}, name: problems}
        if new:
            self._node.metrics.broken_invariants.inc(len(new))
            log.error("broken invariants", replica=name, problems=sorted(new))
