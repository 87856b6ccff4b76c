"""One life of a daemon: a real node with its sides, sets and messengers, on simulated links, ports and executors."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, cast

from simulated_links import SimulatedLinks
from simulated_loop import ManualLoop
from simulated_port import WatchedPort
from simulated_replica import LoopClock, SimulatedReplica, SimulatedSet

from pdd.base.errors import GoingDown, PddError, QueueFull, ReplicaFailed
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.node import Node
from pdd.engine.admission import RETRY_AFTER_S
from pdd.fabric.loopback import LoopbackFabric
from pdd.http.faults import fault_of
from pdd.http.sequences import GenerationFailed
from pdd.lifecycle.request import ErrorInfo, GenerateRequest, TokenOutput
from pdd.topology.model import Topology
from pdd.wire import messages as wire
from pdd.wire.links import Links


class Observer:
    """What the simulation wants to see of its daemons."""

    def complain(self, problem: str) -> None:
        raise NotImplementedError

    def output_sent(self, peer: NodeName, output: TokenOutput) -> None: ...

    def ticket_sent(self, node: NodeName, ticket: wire.PrefillRequest) -> None: ...


class WatchedNode(Node):
    observer: Observer

    def send(self, peer: NodeName, message: wire.Message) -> bool:
        if isinstance(message, wire.PrefillRequest):
            self.observer.ticket_sent(self.name, message)
        if isinstance(message, wire.Output):
            self.observer.output_sent(peer, message.output)
        return super().send(peer, message)


class Client:
    """Someone who reads an answer over HTTP, as far as the gateway goes."""

    def __init__(self, daemon: Daemon, request: GenerateRequest, *, streams: bool = True) -> None:
        self.request = request
        self.daemon = daemon
        self.tokens: list[int] = []
        self.streams = streams
        """It sees tokens as they come; else it gets them all at the end."""
        self.end: str | None = None
        """finished | cancelled | stopped | gone | the code of an error."""
        self._stream = daemon.node.frontend.generate(request)
        self._next: Any = None
        self._waits_for: asyncio.Future[None] | None = None
        self.read()

    @property
    def has_news(self) -> bool:
        return self.end is None and self._waits_for is not None and self._waits_for.done()

    def read(self) -> None:
        """Takes what is there."""
        with self.daemon.loop.running():
            while self.end is None:
                self._next = self._next or self._stream.__anext__()
                try:
                    self._waits_for = self._next.send(None)
                    return
                except StopIteration as item:
                    self._next = None
                    self._take(item.value)
                except PddError as error:
                    self.end = error.code

    def _take(self, output: TokenOutput) -> None:
        if output.anew:
            if self.streams:
                self.daemon.node.observer.complain(f"{self.request.id} begins anew after it was shown")
            self.tokens.clear()
        self.tokens += output.tokens
        if self.streams:
            self.daemon.node.frontend.shown(self.request.id)
        if output.last:
            self.end = output.error.code if output.error is not None else "finished"
            if output.error is not None:
                self._check_error(output.error)
            with suppress(StopAsyncIteration):
                self._stream.__anext__().send(None)

    def _check_error(self, error: ErrorInfo) -> None:
        """Who is told to come again is told when."""
        fault = fault_of(GenerationFailed(error))
        if (error.code == QueueFull.code) != ("Retry-After" in fault.headers()):
            self.daemon.node.observer.complain(f"{self.request.id} is answered with {fault}")
        low, high = RETRY_AFTER_S
        if error.code == QueueFull.code and not low <= (error.retry_after_s or 0) <= high:
            self.daemon.node.observer.complain(f"{self.request.id} may come again after {error.retry_after_s} s")

    def leave(self) -> None:
        self._close("cancelled")

    def stop(self) -> None:
        """It has found a stop string."""
        with self.daemon.loop.running():
            self.daemon.node.frontend.stop(self.request.id)
        self._close("stopped")

    def vanish(self) -> None:
        """With its daemon."""
        if self.end is None:
            self._close("gone")

    def _close(self, end: str) -> None:
        self.end = end
        with self.daemon.loop.running(), suppress(asyncio.CancelledError):
            self._next.throw(asyncio.CancelledError())


class Daemon:
    def __init__(
        self,
        topology: Topology,
        name: NodeName,
        incarnation: Incarnation,
        fabric: LoopbackFabric,
        by_key: dict[bytes, WatchedPort],
        observer: Observer,
    ) -> None:
        self.name = name
        self.loop = ManualLoop()
        configs = topology.replicas(name)

        def make(name: ReplicaName) -> SimulatedReplica:
            return SimulatedReplica(name, configs[name], topology, self.loop, fabric, by_key, observer.complain)

        self._make = make
        self.links = SimulatedLinks(name, incarnation, topology.nodes.keys() - {name})
        self.clients: list[Client] = []
        self.going_down = False
        """Only its links still answer."""
        with self.loop.running():
            self.node = WatchedNode(topology, name, incarnation, LoopClock(self.loop))
            self.node.observer = observer
            self.node.links, self.links.user = cast("Links", self.links), self.node
            self.replicas: list[SimulatedReplica] = []
            for replica in topology.replicas(name):
                self.bring_up(replica)
            self.node.starting = False

    def submit(self, request: GenerateRequest, *, streams: bool = True) -> Client:
        self.clients.append(Client(self, request, streams=streams))
        return self.clients[-1]

    def beat(self) -> None:
        load = self.node.load()
        for peer in list(self.links.up):
            self.links.send(peer, load)

    # What daemon/supervisor.py does.

    def fail(self, replica: SimulatedReplica) -> None:
        """As when `Replica.run` returns."""
        replica.fail(ReplicaFailed("the executor is gone"))
        self.node.down[replica.name] = "failed"
        self.node.announce_to_all()

    def is_idle(self, replica: SimulatedReplica) -> bool:
        return all(self.node.side_of(one.set).idle.is_set() for one in replica.sets)

    def shut_out(self, replica: SimulatedReplica) -> None:
        """Its handoffs did not end in time. It is taken down when they have: where nothing fences, after a lease."""
        replica.shut_out = True
        for one in replica.sets:
            self.node.shut_out_all(one.set, "failed")

    def take_down(self, replica: SimulatedReplica) -> None:
        for one in replica.sets:
            left = [record.machine.tell() for record in self.node.side_of(one.set).records.values()]
            if left:
                self.node.observer.complain(f"{one.set.name} is taken down with {left}")
        for one in replica.sets:
            self.node.remove_set(one.set)
        for one in replica.sets:
            one.set.close()
        self.replicas.remove(replica)

    def bring_up(self, name: ReplicaName) -> None:
        self.node.down.pop(name, None)
        self.replicas.append(self._make(name))
        for one in self.replicas[-1].sets:
            self.node.add_set(one.set)

    # The end of its life.

    def give_up_draining(self) -> None:
        """As when SIGTERM came and requests did not end in time."""
        self.node.draining = True
        self.node.end_all(GoingDown("out of time"))
        self.going_down = True

    def exit(self) -> None:
        """In the order of daemon/main.py: links, then replicas."""
        self.links.close("this daemon is closing")
        for one in self.sets:
            one.set.close()

    def vanish(self) -> None:
        """Killed, or at its end: what it had on the way may still arrive."""
        self.links.die()
        for port in self.ports:
            port.close()
        self.replicas = []
        for client in self.clients:
            client.vanish()
        self.loop.close()

    @property
    def sets(self) -> list[SimulatedSet]:
        return [one for replica in self.replicas for one in replica.sets]

    @property
    def ports(self) -> list[WatchedPort]:
        return [port for one in self.sets for port in one.ports]

    def problems(self) -> list[str]:
        found = [problem for one in self.sets for problem in one.problems()]
        if num_broken := self.node.metrics.broken_invariants._value.get():
            found.append(f"{self.name}: {num_broken:g} broken invariants")
        return found + list(self._overdue())

    def _overdue(self) -> Iterator[str]:
        """A deadline counts from the submission, whatever the request waits for."""
        now_s = self.loop.time()
        for side in self.node._decode.values():
            for record in side.records.values():
                late_s = now_s - record.machine.story[0].at_s - (record.request.timeout_s or float("inf"))
                if late_s > 0 and not record.machine.ending:
                    yield f"{record.id} is {late_s:g} s over its deadline: {record.machine.tell()}"

    def remains(self) -> list[str]:
        found = [what for one in self.sets if one.set.failure is None for what in one.remains()]
        running: list[RequestId] = [record.id for record in self.node.running()]
        held = {
            "running": running,
            "frontends": self.node._frontends,
            "streams": len(self.node.frontend),
            "timers": self.loop.next_timer(),
        }
        return found + [f"{self.name}: {what}: {it}" for what, it in held.items() if it]
