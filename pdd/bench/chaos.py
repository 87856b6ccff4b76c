"""The faults of `pdd soak`: killed, stopped, restarted and drained daemons, killed executors, operators who cancel.

Each fault ends by itself: what was killed is started again at the same address, what was stopped is continued. Faults
of a prefiller and of a decoder may overlap, two of one role may not: the other one of the role is the path around. Kept
apart, each waits until the one before it is over everywhere: what it costs is its own then.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Coroutine, Set
from pathlib import Path
from typing import Any

import structlog

from pdd.base.ids import NodeName
from pdd.bench.toy_cluster import ToyCluster, Unanswered
from pdd.bench.traffic import Traffic
from pdd.wire import admin

log = structlog.get_logger(__name__)

KINDS = (
    "SIGKILL daemon", "SIGKILL executor", "SIGSTOP daemon", "SIGSTOP executor", "restart", "drain and resume",
    "operator cancel",
)  # fmt: skip
RECOVERY_S = 90.0
"""A path that has not answered by then will not."""
PROBE_PAUSE_S = 0.02
HELD_S = 5.0
"""How long a decoder that is to be killed may live on until prefillers work for it."""


class Chaos:
    """`lasting`: nodes whose daemons stay the same process throughout, so that what grows can be seen. `at_once`: how
    many nodes may have a fault at a time. `kinds`: of KINDS."""

    def __init__(
        self,
        cluster: ToyCluster,
        traffic: Traffic,
        rng: random.Random,
        *,
        pause_s: float,
        lasting: set[NodeName],
        at_once: int,
        kinds: Collection[str] = KINDS,
    ) -> None:
        self._cluster = cluster
        self._traffic = traffic
        self._rng = rng
        self._pause_s = pause_s
        self._lasting = lasting
        self._at_once = at_once
        self._faulty: set[NodeName] = set()
        """Nodes with a fault that is not over: one of each role at most."""
        self.injected: Counter[str] = Counter()
        self.around_s: dict[str, list[float]] = defaultdict(list)
        """By fault: seconds until a request sent after it was answered by way of the nodes that are left."""
        self.back_s: dict[str, list[float]] = defaultdict(list)
        """By fault of a decoder: until one was answered at its own HTTP port again."""
        self.pages_s: list[float] = []
        """By SIGKILL of a decoder's daemon while a prefiller had pages for it: seconds until they were free."""
        self.problems: list[str] = []
        self.killed: set[int] = set()
        """Executors whose daemon was killed: they have to go with it."""
        inject = (self._kill_daemon, self._kill_executor, self._stop_daemon, self._stop_executor, self._restart,
                  self._drain, self._cancel)  # fmt: skip
        self._kinds: dict[str, Callable[[NodeName, asyncio.Event], Coroutine[Any, Any, None]]] = {
            kind: fault for kind, fault in zip(KINDS, inject, strict=True) if kind in kinds
        }

    async def run(self, until_s: float) -> None:
        """Until `time.monotonic()` is `until_s`, and the last fault is over."""
        async with asyncio.TaskGroup() as faults:
            while True:
                await asyncio.sleep(self._rng.expovariate(1 / self._pause_s))
                if time.monotonic() >= until_s:
                    return
                kind = self._rng.choice(list(self._kinds))
                free = [node for node in self._cluster.nodes if self._allows(kind, node)]
                if free:
                    node = self._rng.choice(free)
                    self._faulty.add(node)
                    faults.create_task(self._inject(kind, node))

    def _allows(self, kind: str, node: NodeName) -> bool:
        if node in self._lasting and kind in ("SIGKILL daemon", "restart"):
            return False
        if len(self._faulty) >= self._at_once:
            return False
        return self._cluster.role(node) not in {self._cluster.role(faulty) for faulty in self._faulty}

    async def _inject(self, kind: str, node: NodeName) -> None:
        name = f"{kind}, {self._cluster.role(node)}"
        done = asyncio.Event()
        """Set when the fault is there."""
        try:
            log.info("fault", kind=kind, node=node)
            fault = asyncio.create_task(self._kinds[kind](node, done))
            await asyncio.wait((fault, there := asyncio.create_task(done.wait())), return_when=asyncio.FIRST_COMPLETED)
            there.cancel()
            if done.is_set():
                self.injected[name] += 1
                await self._measure(name, node)
            await fault
            await self._cluster.wait_ready(node)
            if self._at_once == 1:
                await asyncio.gather(*map(self._cluster.wait_ready, self._cluster.nodes))
        except Exception as error:
            log.error("fault did not end as it should", kind=kind, node=node, error=repr(error))
            self.problems.append(f"{name} of {node}: {error!r}")
        finally:
            self._faulty.discard(node)

    async def _measure(self, name: str, node: NodeName) -> None:
        urls = self._cluster.urls
        ways = [self._until_served(lambda: urls.keys() - self._faulty or urls.keys(), self.around_s[name], name)]
        if node in urls:
            ways.append(self._until_served(lambda: {node}, self.back_s[name], name))
        await asyncio.gather(*ways)

    async def _until_served(self, nodes: Callable[[], Set[NodeName]], found: list[float], name: str) -> None:
        """Asks one of the nodes after another."""
        began_s = time.monotonic()
        while not await self._traffic.probe(self._cluster.urls[self._rng.choice(sorted(nodes()))]):
            if time.monotonic() - began_s > RECOVERY_S:
                self.problems.append(f"{name}: no answer within {RECOVERY_S:g} s")
                return
            await asyncio.sleep(PROBE_PAUSE_S)
        found.append(time.monotonic() - began_s)
        log.info(
            "served again", fault=name, by=sorted(nodes()), after_s=round(found[-1], 3), faulty=sorted(self._faulty)
        )

    async def _kill_daemon(self, node: NodeName, done: asyncio.Event) -> None:
        held = self._cluster.role(node) == "decode" and await self._until_held(node)
        self.killed |= set(self._cluster.executors(node))
        self._cluster.send_signal(node, signal.SIGKILL)
        done.set()
        if held:
            await self._until_free(node)
        await self._cluster.wait(node)
        await asyncio.sleep(self._rng.uniform(0.1, 2))
        await self._cluster.start(node)

    async def _until_held(self, decoder: NodeName) -> bool:
        """Waits a little for prefillers to hold pages for a decoder; whether they do."""
        until_s = time.monotonic() + HELD_S
        with contextlib.suppress(Unanswered):
            while time.monotonic() < until_s:
                if await self._num_held(decoder):
                    return True
                await asyncio.sleep(PROBE_PAUSE_S)
        return False

    async def _until_free(self, killed: NodeName) -> None:
        """Until no prefiller holds a page for a decoder that was just killed. One that is stopped as well, or down,
        tells nothing: then nothing is noted."""
        began_s = time.monotonic()
        with contextlib.suppress(Unanswered):
            while await self._num_held(killed):
                if time.monotonic() - began_s > RECOVERY_S:
                    self.problems.append(f"{killed} was killed: prefillers hold pages for it after {RECOVERY_S:g} s")
                    return
                await asyncio.sleep(PROBE_PAUSE_S)
            self.pages_s.append(time.monotonic() - began_s)

    async def _num_held(self, decoder: NodeName) -> int:
        """Requests of a decoder that have pages on prefillers."""
        total = 0
        for prefiller in self._cluster.nodes:
            if self._cluster.role(prefiller) == "prefill":
                rows = (await self._cluster.ask(prefiller, "requests", admin.Requests)).requests
                theirs = {row.request for row in rows if row.side == "prefill" and row.peer.startswith(f"{decoder}/")}
                pools = (await self._cluster.ask(prefiller, "kv", admin.KvReports)).replicas
                total += len(theirs & {page.owner for pool in pools for page in pool.owners})
        return total

    async def _kill_executor(self, node: NodeName, done: asyncio.Event) -> None:
        if executors := self._cluster.executors(node):
            os.kill(self._rng.choice(executors), signal.SIGKILL)
            done.set()

    async def _stop_daemon(self, node: NodeName, done: asyncio.Event) -> None:
        self._cluster.send_signal(node, signal.SIGSTOP)
        done.set()
        try:
            await asyncio.sleep(self._rng.uniform(0.1, 5))
        finally:
            self._cluster.send_signal(node, signal.SIGCONT)

    async def _stop_executor(self, node: NodeName, done: asyncio.Event) -> None:
        if not (executors := self._cluster.executors(node)):
            return
        executor = self._rng.choice(executors)
        os.kill(executor, signal.SIGSTOP)
        done.set()
        try:
            await asyncio.sleep(self._rng.uniform(0.1, 5))
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(executor, signal.SIGCONT)

    async def _restart(self, node: NodeName, done: asyncio.Event) -> None:
        self._cluster.send_signal(node, signal.SIGTERM)
        done.set()
        if code := await self._cluster.wait(node):
            self.problems.append(f"{node} ended with exit code {code} when told to stop")
        await self._cluster.start(node)

    async def _drain(self, node: NodeName, done: asyncio.Event) -> None:
        await self._cluster.ask(node, "drain", admin.DrainResult)
        done.set()
        try:
            await asyncio.sleep(self._rng.uniform(0.2, 2))
        finally:
            await self._cluster.ask(node, "resume", admin.DrainResult)

    async def _cancel(self, node: NodeName, done: asyncio.Event) -> None:
        """Of any request that runs there; there may be none, or it may just have ended."""
        rows = (await self._cluster.ask(node, "requests", admin.Requests)).requests
        running = [row.request for row in rows if row.state not in ("finished", "cancelled", "failed", "sent")]
        if running:
            with contextlib.suppress(Unanswered):
                await self._cluster.ask(node, "cancel", admin.CancelResult, self._rng.choice(running))
                done.set()

    def orphans(self) -> list[int]:
        """Executors that outlived a daemon that was killed."""
        return [pid for pid in sorted(self.killed) if _runs_an_executor(pid)]


def _runs_an_executor(pid: int) -> bool:
    try:
        return b"pdd" in Path(f"/proc/{pid}/cmdline").read_bytes()  # empty for a zombie
    except OSError:
        return False
