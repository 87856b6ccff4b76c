"""A replica of one life of a daemon: its sets and their executors, stepped as daemon/replica.py does it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import cast

import msgspec
from simulated_fairness import Fairness
from simulated_loop import ManualLoop
from simulated_port import WatchedPort, owned_by
from simulated_ranks import MODEL, SimulatedRanks

from pdd.base.errors import PddError
from pdd.base.ids import ReplicaName, set_name
from pdd.daemon.replica_set import ReplicaSet
from pdd.engine.config import TextConfig
from pdd.engine.pack import PackedModel
from pdd.engine.plan import StepPlan
from pdd.engine.protocol import Sampled, Step
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.loopback import LoopbackFabric
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology.model import Replica as ReplicaConfig
from pdd.topology.model import Role, Topology
from pdd.transfer.group import MessengerGroup
from pdd.transfer.messenger import Messenger

_PACKED = PackedModel(
    dir=Path("/nonexistent"), config=MODEL, text=TextConfig(kind="toy"), digest="0" * 16, dtype="float32"
)


class LoopClock:
    def __init__(self, loop: ManualLoop) -> None:
        self._loop = loop

    def now_s(self) -> float:
        return self._loop.time()


class _Work(asyncio.Event):
    """Wakes every loop that waits for it, even if another clears it before they run."""

    def __init__(self) -> None:
        super().__init__()
        self.loops: list[StepLoop] = []

    def set(self) -> None:
        super().set()
        for loop in self.loops:
            loop.hungry = True


class SimulatedReplica:
    """dp sets, which step on their own or, where their ranks share experts, jointly."""

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        topology: Topology,
        loop: ManualLoop,
        fabric: LoopbackFabric,
        by_key: dict[int, WatchedPort],
        complain: Callable[[str], None],
    ) -> None:
        self.name = name
        work, dp = _Work(), config.parallel.dp
        self.sets = [
            SimulatedSet(set_name(name, rank, dp), config, topology, loop, fabric, by_key, work, complain)
            for rank in range(dp)
        ]
        together = [self.sets] if config.parallel.ep > 1 else [[one] for one in self.sets]
        self.loops = work.loops = [StepLoop(sets) for sets in together]
        self.shut_out = False
        """It has failed, and its handoffs got no more time."""

    @property
    def failed(self) -> bool:
        return self.sets[0].set.failure is not None

    @property
    def broken(self) -> bool:
        return any(one.set.broken.is_set() for one in self.sets)

    def fail(self, error: PddError) -> None:
        """An executor is gone, and the others are killed after it."""
        for loop in self.loops:
            loop.abandon()
        for one in self.sets:
            one.set.fail(error)


class StepLoop:
    """Sets that step together: none begins a step before all have ended the one before."""

    def __init__(self, sets: Sequence[SimulatedSet]) -> None:
        self.sets = sets
        self.hungry = True

    @property
    def may_plan(self) -> bool:
        return self.hungry and self.sets[0].set.failure is None and not any(one.in_step for one in self.sets)

    def plan(self) -> None:
        plans = [one.set.plan() for one in self.sets]
        if not any(plans):
            self.hungry = False
            return
        joint = len(self.sets) > 1 and any(plan is not None and plan.step.rows for plan in plans)
        for one, plan in zip(self.sets, plans, strict=True):
            one.begin(plan, joint)

    def compute(self, one: SimulatedSet) -> None:
        """The next thing happens to a set's part of the step, and when that was the last one, the daemon hears of all
        parts."""
        one.compute()
        if not any(it.computing for it in self.sets):
            for each in self.sets:
                each.complete()
            self.hungry = True

    def abandon(self) -> None:
        for one in self.sets:
            one.in_step, one.computing = False, False


class SimulatedSet:
    """A replica set with its executors."""

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        topology: Topology,
        loop: ManualLoop,
        fabric: LoopbackFabric,
        by_key: dict[int, WatchedPort],
        work: asyncio.Event,
        complain: Callable[[str], None],
    ) -> None:
        shape = _shape(config)
        self.in_step = False
        """Between `begin` and `complete`."""
        self.computing = False
        self._complain = complain
        self._plan: StepPlan | None = None
        self._sampled: list[Sampled] = []
        self.ranks = SimulatedRanks(shape)
        self.set = ReplicaSet(
            name, config, _PACKED, shape, max_sequence_tokens=max_sequence_tokens(topology),
            max_queue=topology.limits.max_queue, clock=LoopClock(loop), work=work,
        )  # fmt: skip
        self._fairness = Fairness(self.set, config.chunk_tokens, config.max_sequences)
        for _ in range(100):
            self.set.admission.learn(1)  # answers look short, so that pools are filled and sequences preempted
        self.ports: list[WatchedPort] = []
        if config.role is not Role.COLOCATED:
            self._open_fabric(config, fabric, by_key, loop, topology.handoff.lease_s)

    def _open_fabric(
        self,
        config: ReplicaConfig,
        fabric: LoopbackFabric,
        by_key: dict[int, WatchedPort],
        loop: ManualLoop,
        late_s: float,
    ) -> None:
        one, messengers = self.set, []
        for memory in self.ranks.memories:
            for _ in range(config.num_nics):
                port = WatchedPort.open(
                    fabric, memory, one.pool, by_key, self._complain, now_s=loop.time, late_s=late_s
                )
                watch = port.watch(self.ranks.counter_address, -1) if config.role is Role.PREFILL else None
                messengers.append(Messenger(port, one.layout, memory.address, watch))
                self.ports.append(port)
        ports = cast("list[LibfabricPort]", self.ports)
        arenas = cast("list[Arena]", self.ranks.memories)
        one.open_fabric(ports, MessengerGroup(one.shape, messengers), arenas)

    def begin(self, plan: StepPlan | None, joint: bool) -> None:
        step = plan.step if plan is not None else Step(number=0, release=[], start=[], rows=[])
        self._plan, self._sampled = plan, []
        for problem in self._fairness.planned(plan) if plan is not None else ():
            self._complain(f"{self.set.name}: {problem}")
        self._step = msgspec.structs.replace(step, joint=True) if joint else step
        self._run = self._steps()
        self.in_step = self.computing = True

    def compute(self) -> None:
        """Something happens at the executors; at last they answer."""
        self._check_rows()
        self.computing = next(self._run, "over") != "over"

    def complete(self) -> None:
        self.in_step = False
        if self._plan is not None:
            self.set.complete(self._plan, self._sampled, 0.001)

    def problems(self) -> list[str]:
        messenger, name = self.set._messenger, self.set.name
        found = [f"{name}: {problem}" for problem in self.set.problems()]
        if messenger is not None and (messenger.counters.strays):
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

    def _steps(self) -> Generator[None, None, None]:
        if self._step.rows or self._step.release or self._step.joint:
            self._sampled = yield from self.ranks.compute(self._step)
        else:
            yield  # the daemon's event loop takes a turn

    def _check_rows(self) -> None:
        """What a step writes to belongs to its request until the step has ended."""
        if self._plan is None or self.ranks.step is not self._step:
            return
        pool = self.set.pool
        for index, request in enumerate(self._plan.requests):
            foreign = set(self.ranks.written_pages(index)) - owned_by(pool, request)
            if foreign:
                self._complain(f"{self.set.name}: pages {foreign} are computed for {request}, which does not own them")


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
