"""One daemon from start to end: admin socket, links, HTTP and replicas come up; a signal drains them; down they go."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from functools import partial
from typing import Protocol

import structlog

from pdd.base.clock import MonotonicClock
from pdd.base.errors import GoingDown, TopologyInvalid
from pdd.base.ids import NodeName, ReplicaName, new_incarnation
from pdd.daemon import report
from pdd.daemon.admin import AdminServer
from pdd.daemon.audit import Audit
from pdd.daemon.gateway import Gateway
from pdd.daemon.log_stream import LogStream
from pdd.daemon.node import Node
from pdd.daemon.rank import executor_configs
from pdd.daemon.readiness import readiness, standstill
from pdd.daemon.replica import Replica, try_fabric
from pdd.daemon.service import Notifier, on_signals
from pdd.daemon.supervisor import Supervisor
from pdd.engine.pack import PackedModel
from pdd.engine.sharding import check_parallel
from pdd.engine.worker import plan_layout
from pdd.topology.cores import local_progress_cores
from pdd.topology.model import Http, Role, Topology
from pdd.topology.model import Replica as ReplicaConfig
from pdd.topology.nics import port_hosts
from pdd.topology.run_dir import make_run_dir
from pdd.wire.admin import socket_path
from pdd.wire.links import Links
from pdd.wire.tls import LinkTls

log = structlog.get_logger(__name__)

_DRAIN_POLL_S = 0.05
_STATUS_S = 1.0
"""How often what systemd is told is looked at, where its watchdog does not ask for more."""


class HttpService(Protocol):
    async def start(self) -> None: ...

    async def stop(self) -> None: ...


MakeHttp = Callable[[Gateway, Http], HttpService]
"""The HTTP floor is a sibling of this one: whoever knows both (pdd/__main__.py) passes it in."""


class Daemon:
    """`run` is its whole life."""

    def __init__(
        self,
        topology: Topology,
        name: NodeName,
        model: PackedModel,
        *,
        key: bytes,
        tls: LinkTls | None,
        logs: LogStream,
        make_http: MakeHttp,
    ) -> None:
        self._topology = topology
        self._name = name
        self._model = model
        self._key = key
        self._tls = tls
        self._make_http = make_http
        self._notifier = Notifier()
        self._node = Node(topology, name, new_incarnation(), MonotonicClock())
        logs.tell_losses(self._node.metrics.log_lines_lost.inc)

    async def run(self) -> None:
        """Serves until a signal, then drains. Raises PddError when it cannot start."""
        stopping = asyncio.Event()
        on_signals(lambda _: stopping.set())
        # Whoever asks goes before what answers: HTTP, links and admin socket close while the replicas are still there.
        async with AsyncExitStack() as replicas, AsyncExitStack() as fronts:
            await self._open(fronts)
            serving = asyncio.create_task(self._serve(replicas))
            signalled = asyncio.create_task(stopping.wait())
            alive = asyncio.create_task(self._tell_systemd())
            audit = asyncio.create_task(Audit(self._node).run())
            try:
                await asyncio.wait((serving, signalled), return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    await serving
                log.info("stopping")
                await self._drain()
            finally:
                tasks = (serving, signalled, alive, audit)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _open(self, stack: AsyncExitStack) -> None:
        """Everything that listens; a busy port is found before a model is loaded."""
        node, config = self._node, self._topology.nodes[self._name]
        path = socket_path(make_run_dir(self._topology), self._name)
        admin = AdminServer(path, partial(report.answer, node), node.metrics.admin_refused.inc)
        await admin.start()
        stack.push_async_callback(admin.stop)
        node.links = self._links()
        stack.push_async_callback(node.links.close)
        await node.links.start()
        if config.http is not None:
            server = self._make_http(Gateway(node), config.http)
            await server.start()
            stack.push_async_callback(server.stop)

    def _links(self) -> Links:
        names = list(self._topology.nodes)
        config = self._topology.nodes[self._name]
        cluster = self._topology.cluster
        return Links(
            node=self._name,
            incarnation=self._node.incarnation,
            cluster=cluster.name,
            key=self._key,
            host=config.host,
            port=config.control_port,
            peers={it: (node.host, node.control_port) for it, node in self._topology.nodes.items() if it != self._name},
            dial=names[names.index(self._name) + 1 :],
            heartbeat_s=cluster.heartbeat_s,
            silence_s=cluster.silence_s,
            user=self._node,
            tls=self._tls,
        )

    async def _serve(self, stack: AsyncExitStack) -> None:
        """Starts the replicas and keeps them running. Raises PddError when one cannot start at all."""
        topology, node = self._topology, self._node
        runs: list[asyncio.Task[None]] = []
        try:
            for config in topology.replicas(self._name).values():
                try_fabric(config, topology.fabric, self._hosts(config))
            for name, config in topology.replicas(self._name).items():
                supervisor = Supervisor(node, name, partial(self._start_replica, name, config))
                stack.push_async_callback(supervisor.stop)
                await supervisor.start()
                runs.append(asyncio.create_task(supervisor.run()))
            node.starting = False
            state = readiness(node)
            log.info("node up", ready=state.ready, reason=state.reason)
            self._notifier.ready(state.reason)
            await asyncio.gather(*runs, asyncio.Event().wait())
        finally:
            for run in runs:
                run.cancel()
            await asyncio.gather(*runs, return_exceptions=True)

    def _hosts(self, config: ReplicaConfig) -> tuple[tuple[str, ...], ...]:
        """Of each rank's NICs."""
        return port_hosts(config, self._topology.nodes[self._name].host, self._topology.fabric.provider)

    async def _start_replica(self, name: ReplicaName, config: ReplicaConfig) -> Replica:
        topology, node = self._topology, self._node
        return await Replica.start(
            name,
            config,
            self._model,
            hosts=self._hosts(config),
            progress_cores=local_progress_cores(topology, self._name, config),
            run_dir=make_run_dir(topology),
            fabric=topology.fabric,
            limits=topology.limits,
            max_sequence_tokens=max_sequence_tokens(topology, self._model),
            clock=node.clock,
            metrics=node.metrics,
        )

    async def _drain(self) -> None:
        """Takes no new requests and lets the running ones end, for `limits.drain_s` at most."""
        node, drain_s = self._node, self._topology.limits.drain_s
        node.stopping = True
        node.drain(True)
        self._notifier.stopping(drain_s)
        try:
            async with asyncio.timeout(drain_s):
                unfinished = None
                while num_running := node.num_unfinished:
                    if num_running != unfinished:
                        log.info("draining", unfinished=num_running)
                    unfinished = num_running
                    await asyncio.sleep(_DRAIN_POLL_S)
        except TimeoutError:
            log.warning("requests did not end in time", drain_s=drain_s, unfinished=node.num_unfinished)
            node.end_all(GoingDown(f"node {node.name} is going down; the request did not end within {drain_s:g} s"))

    async def _tell_systemd(self) -> None:
        """How it serves, when that changes. The watchdog hears from the event loop itself, and only while that and the
        executors make progress."""
        notifier, said = self._notifier, ""
        while notifier.heard:
            if notifier.watchdog_s:
                stuck = standstill(self._node)
                if stuck is None:
                    notifier.alive()
                else:
                    log.error("the watchdog is not fed", reason=stuck)
            if (reason := readiness(self._node).reason) != said:
                notifier.status(reason)
                said = reason
            await asyncio.sleep(min(notifier.watchdog_s / 3 or _STATUS_S, _STATUS_S))


def max_sequence_tokens(topology: Topology, model: PackedModel) -> int:
    """Prompt and answer together: the least of what the model was trained for, what the topology allows, and what
    the smallest decoder's KV memory holds. Raises TopologyInvalid when one holds no page at all."""
    most = [model.config.max_position]
    if topology.model.max_sequence_tokens is not None:
        most.append(topology.model.max_sequence_tokens)
    for node in topology.nodes:
        for name, config in topology.replicas(node).items():
            layout = plan_layout(model.config, executor_configs(name, config, model, "")[0])
            if config.role is not Role.PREFILL:
                most.append(layout.num_pages * layout.page_tokens)
    return min(most)


def check_shapes(topology: Topology, model: PackedModel) -> None:
    """Raises TopologyInvalid, one line a fault, when the model does not divide among the ranks of a replica."""
    faults = [
        f"replica {name}: {fault}"
        for node in topology.nodes
        for name, config in topology.replicas(node).items()
        for fault in check_parallel(model.config, config.parallel.tp, config.parallel.dp, config.parallel.ep)
    ]
    if faults:
        raise TopologyInvalid("\n".join(faults))
