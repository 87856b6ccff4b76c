"""Keeps one replica of the topology running: after a failure it is taken down whole and started again, a little later
each time. The other replicas of the node and their requests do not notice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from pdd.base.errors import PddError, ReplicaFailed
from pdd.base.ids import ReplicaName
from pdd.daemon.node import Node
from pdd.daemon.replica import Replica

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0
SETTLED_S = 120.0
"""A replica that ran this long was no failure of its start: the next one comes soon again."""
DRAIN_S = 5.0
"""How long the handoffs of a failed replica may take to end by themselves before their peers are shut out."""


class Supervisor:
    """`make` starts the executors and opens the fabric."""

    def __init__(self, node: Node, name: ReplicaName, make: Callable[[], Awaitable[Replica]]) -> None:
        self._node = node
        self._name = name
        self._make = make
        self._replica: Replica | None = None

    async def start(self) -> None:
        """Raises PddError when the replica cannot start."""
        try:
            replica = await self._make()
        except OSError as error:  # no descriptor, process or memory is left to start it with
            raise ReplicaFailed(f"{self._name} cannot start: {error.strerror or error}") from error
        try:
            for one in replica.sets:
                self._node.add_set(one)
        except PddError:
            for one in replica.sets:
                self._node.remove_set(one)
            await replica.stop()
            raise
        self._node.down.pop(self._name, None)
        self._replica = replica

    async def run(self) -> None:
        """Until it is cancelled: after `start`, and again after each failure."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            replica = self._replica
            assert replica is not None  # started, or started again
            began_s = self._node.clock.now_s()
            error = await replica.run()
            await self._take_down(replica, error)
            if self._node.clock.now_s() - began_s > SETTLED_S:
                backoff_s = FIRST_BACKOFF_S
            backoff_s = await self._restart(error, backoff_s)

    async def stop(self) -> None:
        if self._replica is not None:
            await self._replica.stop()

    async def _restart(self, error: PddError, backoff_s: float) -> float:
        """Tries until it is up; returns how long to wait the next time."""
        while True:
            self._node.down[self._name] = f"{error}; it is started again in {backoff_s:g} s"
            log.warning("replica down", replica=self._name, error=str(error), again_s=backoff_s)
            await asyncio.sleep(backoff_s)
            self._node.down[self._name] = f"{error}; it is starting again"
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)
            try:
                await self.start()
            except PddError as again:
                error = again
            else:
                self._node.metrics.replica_restarts.labels(self._name).inc()
                return backoff_s

    async def _take_down(self, replica: Replica, error: PddError) -> None:
        """Its requests were told; their pages belong to memory that goes away, so first nobody may write there."""
        self._node.down[self._name] = str(error)
        self._node.announce_to_all()
        if not await self._idle_within(replica, DRAIN_S):
            for one in replica.sets:
                self._node.shut_out_all(one, f"{one.name} failed")
            # Where the provider fences they are idle now. Elsewhere late writes of those that were shut out may still
            # come for a lease (Handoffs._shut_out).
            if not await self._idle_within(replica, self._node.topology.handoff.lease_s + DRAIN_S):
                log.error("a failed replica is taken down with requests that have not ended", replica=self._name)
        for one in replica.sets:
            self._node.remove_set(one)
        self._replica = None
        await replica.stop()

    async def _idle_within(self, replica: Replica, seconds: float) -> bool:
        """Whether all its requests end by then."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(self._node.side_of(one).idle.wait() for one in replica.sets))
        except TimeoutError:
            return False
        return True
