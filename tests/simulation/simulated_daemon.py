"""One life of a daemon: a real node with its sides, sets and messengers, on simulated links, ports and executors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import msgspec
from simulated_links import SimulatedLinks
from simulated_loop import ManualLoop
from simulated_port import WatchedPort, owned_by
from simulated_ranks import MODEL, SimulatedRanks

from pdd.base.errors import GoingDown, PddError, ReplicaFailed
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.node import Node
from pdd.daemon.replica_set import ReplicaSet
from pdd.engine.config import TextConfig
from pdd.engine.pack import PackedModel
from pdd.engine.plan import StepPlan
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.loopback import LoopbackFabric
from pdd.lifecycle.request import GenerateRequest, TokenOutput
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology.model import Replica as ReplicaConfig
from pdd.topology.model import Role, Topology
from pdd.transfer.group import MessengerGroup
from pdd.transfer.messenger import Messenger
from pdd.wire import messages as wire
from pdd.wire.links import Links

_PACKED = PackedModel(
    dir=Path("/nonexistent"), config=MODEL, text=TextConfig(kind="toy"), digest="0" * 16, dtype="float32"
)


class LoopClock:
    def __init__(self, loop: ManualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class Observer:
    """What the simulation wants to see of its daemons."""

    def complain(self, problem: str) -> None:
        raise NotImplementedError

    def output_sent(self, output: TokenOutput) -> None: ...

    def ticket_sent(self, node: NodeName, ticket: wire.PrefillRequest) -> None: ...


class WatchedNode(Node):
    observer: Observer

    def send(self, peer: NodeName, message: wire.Message) -> bool:
        if isinstance(message, wire.PrefillRequest):
            self.observer.ticket_sent(self.name, message)
        if isinstance(message, wire.Output):
            self.observer.output_sent(message.output)
        return super().send(peer, message)


class SimulatedSet:
    """A replica set with its executors, stepped as daemon/replica.py does it."""

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        topology: Topology,
        loop: ManualLoop,
        fabric: LoopbackFabric,
        by_key: dict[bytes, WatchedPort],
        complain: Callable[[str], None],
    ) -> None:
        shape = _shape(config)
        self._complain = complain
        self._work = asyncio.Event()
        self._hungry = True
        self._step: Generator[None, None, None] | None = None
        self.ranks = SimulatedRanks(shape)
        self.set = ReplicaSet(
            name, config, _PACKED, shape, max_sequence_tokens=max_sequence_tokens(topology),
            max_queue=topology.limits.max_queue, clock=LoopClock(loop), work=self._work,
        )  # fmt: skip
        for _ in range(100):
            self.set.admission.learn(1)  # answers look short, so that pools are filled and sequences preempted
        self.ports: list[WatchedPort] = []
        if config.role is not Role.COLOCATED:
            self._open_fabric(config, fabric, by_key)

    def _open_fabric(self, config: ReplicaConfig, fabric: LoopbackFabric, by_key: dict[bytes, WatchedPort]) -> None:
        one, messengers = self.set, []
        for memory in self.ranks.memories:
            port = WatchedPort.open(fabric, memory, one.pool, by_key, self._complain)
            watch = port.watch(self.ranks.counter_address, -1) if config.role is Role.PREFILL else None
            messengers.append(Messenger(port, one.layout, memory.address, watch))
            self.ports.append(port)
        ports = cast("list[LibfabricPort]", self.ports)
        arenas = cast("list[Arena]", self.ranks.memories)
        one.open_fabric(ports, MessengerGroup(one.shape, messengers), arenas)

    @property
    def computing(self) -> bool:
        return self._step is not None

    @property
    def may_plan(self) -> bool:
        return self._step is None and self.set.failure is None and (self._hungry or self._work.is_set())

    def plan(self) -> None:
        plan = self.set.plan()
        if plan is not None:
            self._plan, self._step = plan, self._run(plan)
        else:
            self._hungry = False
            self._work.clear()

    def compute(self) -> None:
        """The next thing happens to the step: at the executors, or at last its report to the daemon."""
        assert self._step is not None
        if self.set.failure is None:
            self._check_rows()
        try:
            next(self._step)
        except StopIteration:
            self._step, self._hungry = None, True

    def fail(self, error: PddError) -> None:
        """The executors are gone."""
        self._step = None
        self.set.fail(error)

    def problems(self) -> list[str]:
        messenger, name = self.set._messenger, self.set.name
        found = [f"{name}: {problem}" for problem in self.set.problems()]
        if messenger is not None and (messenger.counters.contradictions or messenger.counters.strays):
            found.append(f"{name}: {messenger.counters}")
        return found

    def remains(self) -> list[str]:
        """What is still held when every request has ended."""
        one, messenger = self.set, self.set._messenger
        held: dict[str, object] = {
            "owned pages": one.pool.num_owned,
            "quarantined pages": one.pool.num_quarantined,
            "slots": one.admission.num_admitted,
            "in line": one.admission.num_waiting,
            "scheduled": one.scheduler.num_running + one.scheduler.num_preempted,
            "leaving": len(one._leaving),
            "threads": len(one._hashing),
            "inbound": list(messenger._inbound) if messenger else [],
            "outbound": list(messenger._outbound) if messenger else [],
            "known to executors": self.ranks.num_sequences,
        }
        return [f"{one.name}: {what}: {number}" for what, number in held.items() if number]

    def _run(self, plan: StepPlan) -> Generator[None, None, None]:
        sampled = []
        if plan.step.rows or plan.step.release:
            sampled = yield from self.ranks.compute(plan.step)
        else:
            yield  # the daemon's event loop takes a turn
        self.set.complete(plan, sampled, 0.001)

    def _check_rows(self) -> None:
        """What a step writes to belongs to its request until the step has ended."""
        if self.ranks.step is not self._plan.step:
            return
        pool = self.set.pool
        for index, request in enumerate(self._plan.requests):
            foreign = set(self.ranks.written_pages(index)) - owned_by(pool, request)
            if foreign:
                self._complain(f"{self.set.name}: pages {foreign} are computed for {request}, which does not own them")


class Client:
    """Someone who reads an answer over HTTP, as far as the gateway goes."""

    def __init__(self, daemon: Daemon, request: GenerateRequest) -> None:
        self.request = request
        self.daemon = daemon
        self.tokens: list[int] = []
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
        self.tokens += output.tokens
        if output.last:
            self.end = output.error.code if output.error is not None else "finished"
            with suppress(StopAsyncIteration):
                self._stream.__anext__().send(None)

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

        def make_set(replica: ReplicaName) -> SimulatedSet:
            return SimulatedSet(replica, configs[replica], topology, self.loop, fabric, by_key, observer.complain)

        self._make_set = make_set
        self.links = SimulatedLinks(name, incarnation, topology.nodes.keys() - {name})
        self.clients: list[Client] = []
        self.going_down = False
        """Only its links still answer."""
        with self.loop.running():
            self.node = WatchedNode(topology, name, incarnation, LoopClock(self.loop))
            self.node.observer = observer
            self.node.links, self.links.user = cast("Links", self.links), self.node
            self.sets: list[SimulatedSet] = []
            for replica in topology.replicas(name):
                self.bring_up(replica)
            self.node.starting = False

    def submit(self, request: GenerateRequest) -> Client:
        self.clients.append(Client(self, request))
        return self.clients[-1]

    def beat(self) -> None:
        load = self.node.load()
        for peer in list(self.links.up):
            self.links.send(peer, load)

    # What daemon/supervisor.py does.

    def fail(self, one: SimulatedSet) -> None:
        """As when `Replica.run` returns."""
        one.fail(ReplicaFailed("the executor is gone"))
        self.node.down[one.set.name] = "failed"
        self.node.announce_to_all()

    def shut_out(self, one: SimulatedSet) -> None:
        """Its handoffs did not end in time."""
        self.node.shut_out_all(one.set, "failed")
        self.take_down(one)

    def take_down(self, one: SimulatedSet) -> None:
        left = [record.machine.tell() for record in self.node.side_of(one.set).records.values()]
        if left:
            self.node.observer.complain(f"{one.set.name} is taken down with {left}")
        self.node.remove_set(one.set)
        one.set.close()
        self.sets.remove(one)

    def bring_up(self, name: ReplicaName) -> None:
        self.node.down.pop(name, None)
        self.sets.append(self._make_set(name))
        self.node.add_set(self.sets[-1].set)

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
        self.sets = []
        for client in self.clients:
            client.vanish()
        self.loop.close()

    @property
    def ports(self) -> list[WatchedPort]:
        return [port for one in self.sets for port in one.ports]

    def problems(self) -> list[str]:
        found = [problem for one in self.sets for problem in one.problems()]
        if num_broken := self.node.metrics.broken_invariants._value.get():
            found.append(f"{self.name}: {num_broken:g} broken invariants")
        return found

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


def max_sequence_tokens(topology: Topology) -> int:
    """As daemon/main.py finds it."""
    decoders = [it for node in topology.nodes.values() for it in node.replicas if it.role is not Role.PREFILL]
    layouts = [_shape(it).layout for it in decoders]
    return min(topology.model.max_sequence_tokens or MODEL.max_position,
               *(layout.num_pages * layout.page_tokens for layout in layouts))  # fmt: skip


def _shape(config: ReplicaConfig) -> KvShape:
    tp = config.parallel.tp
    layout = KvLayout(
        num_layers=MODEL.num_layers, num_kv_heads=MODEL.num_kv_heads // tp, head_dim=MODEL.head_dim,
        page_tokens=config.page_tokens, dtype="float32", num_pages=0,
    )  # fmt: skip
    num_pages = config.kv_bytes // (layout.num_layers * layout.page_bytes)
    return KvShape(tp=tp, num_kv_heads=MODEL.num_kv_heads, layout=msgspec.structs.replace(layout, num_pages=num_pages))
