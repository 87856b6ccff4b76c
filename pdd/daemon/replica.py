"""One local replica: dp sets of tp ranks each, and the loops that step them.

Sets step on their own, except where their ranks share the experts of a MoE layer (ep > 1): then every step of one is a
step of all, and a set without work takes part with an empty one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import structlog

from pdd.base.clock import Clock
from pdd.base.errors import PddError, ReplicaFailed
from pdd.base.ids import ReplicaName, set_name
from pdd.daemon.metrics import Metrics
from pdd.daemon.rank import Rank, executor_configs
from pdd.daemon.replica_set import Asked, ReplicaSet
from pdd.engine.handle import ExecutorHandle
from pdd.engine.pack import PackedModel
from pdd.engine.plan import StepPlan
from pdd.engine.protocol import Step, StepDone
from pdd.fabric.libfabric import LibfabricPort, measure
from pdd.memory.shape import KvShape
from pdd.topology.cores import CpuLists
from pdd.topology.model import Fabric, Limits, Role, SameHost
from pdd.topology.model import Replica as ReplicaConfig
from pdd.transfer.group import MessengerGroup
from pdd.transfer.messenger import Messenger

log = structlog.get_logger(__name__)

_AFTERMATH_S = 0.2
_PROBE_S = 1.0
"""How often executors without work are asked whether they are there."""
_NUM_BEATS = 4
"""Parts that a time limit of an executor is waited for in."""


class Replica:
    """Made by `start`. `run` is its life; `stop` ends it."""

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        *,
        ranks: list[Rank],
        sets: list[ReplicaSet],
        work: asyncio.Event,
        limits: Limits,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.role = config.role
        self.sets = sets
        self._parallel = config.parallel
        self._ranks = ranks
        self._work = work
        self._limits = limits
        self._clock = clock
        self._metrics = metrics

    @classmethod
    async def start(
        cls,
        name: ReplicaName,
        config: ReplicaConfig,
        model: PackedModel,
        *,
        hosts: tuple[tuple[str, ...], ...],
        progress_cores: CpuLists,
        run_dir: Path,
        fabric: Fabric,
        limits: Limits,
        max_sequence_tokens: int,
        clock: Clock,
        metrics: Metrics,
    ) -> Replica:
        """Starts the executors, waits for their models, and opens the fabric: on `hosts`, with progress threads on
        `progress_cores`, for each rank. Raises PddError; OSError when the system has nothing left to start it with."""
        ranks = await _start_ranks(name, config, model, run_dir, limits.load_s)
        work = asyncio.Event()
        tp, dp = config.parallel.tp, config.parallel.dp
        shape = KvShape(tp=tp, num_kv_heads=model.config.num_kv_heads, layout=ranks[0].layout)
        sets = [
            ReplicaSet(
                set_name(name, dp_rank, dp), config, model, shape,
                max_sequence_tokens=max_sequence_tokens, max_queue=limits.max_queue, clock=clock, work=work,
            )
            for dp_rank in range(dp)
        ]  # fmt: skip
        replica = cls(name, config, ranks=ranks, sets=sets, work=work, limits=limits, clock=clock, metrics=metrics)
        try:
            if config.role is not Role.COLOCATED:
                for dp_rank, one in enumerate(sets):
                    of_set = slice(dp_rank * tp, (dp_rank + 1) * tp)
                    _open_fabric(one, ranks[of_set], fabric, hosts[of_set], progress_cores[of_set])
        except BaseException:
            await replica.stop()
            raise
        log.info("replica up", replica=name, role=str(config.role), tp=tp, dp=dp, ep=config.parallel.ep,
                 pages=shape.layout.num_pages, page_bytes=shape.layout.page_bytes,
                 load_s=round(max(rank.handle.ready.load_s for rank in ranks), 3))  # fmt: skip
        return replica

    @property
    def failure(self) -> str | None:
        return self.sets[0].failure

    async def run(self) -> PddError:
        """Steps for as long as all executors live; returns why it ended."""
        together = [self.sets] if self._parallel.ep > 1 else [[one] for one in self.sets]
        exits = [asyncio.create_task(_exit_of(rank.handle)) for rank in self._ranks]
        ways = [
            *exits,
            *(asyncio.create_task(_breakage_of(one)) for one in self.sets),
            *(asyncio.create_task(self._turn_for_ever(sets)) for sets in together),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            # A rank that dies takes the others along: a moment later it is known which of them was killed.
            await asyncio.wait(exits, timeout=_AFTERMATH_S)
            killed = (task for rank, task in zip(self._ranks, exits, strict=True) if rank.handle.killed and task.done())
            error = next(killed, None) or next(task for task in ways if task.done())
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        cause = error.result()
        log.error("replica failed", replica=self.name, error=str(cause))
        for rank in self._ranks:  # one that is stuck would not go by itself; the others may be waiting for it
            rank.handle.kill()
        for one in self.sets:
            one.fail(cause)
        return cause

    async def stop(self) -> None:
        """Closes the ports before the memory that they may write to. Idempotent."""
        for one in self.sets:
            one.close()
        await asyncio.gather(*(one.hashed() for one in self.sets))
        await asyncio.gather(*(rank.close() for rank in self._ranks))

    async def _turn_for_ever(self, sets: list[ReplicaSet]) -> PddError:
        try:
            while True:
                plans = [one.plan() for one in sets]
                if not any(plans):
                    await self._rest(sets)
                    continue
                await self._step(sets, plans)
        except PddError as error:
            return error

    async def _rest(self, sets: list[ReplicaSet]) -> None:
        """Until there may be work again, or it is time to see whether the executors are still there."""
        # Whoever sets the event wakes all loops of the replica; each looks for itself.
        self._work.clear()
        try:
            async with asyncio.timeout(_PROBE_S):
                await self._work.wait()
        except TimeoutError:
            nothing = Step(number=0, release=[], start=[], rows=[])
            await asyncio.gather(
                *(self._ask(one, nothing, Asked("answer", "answer_s", self._limits.answer_s)) for one in sets)
            )

    async def _step(self, sets: list[ReplicaSet], plans: list[StepPlan | None]) -> None:
        joint = len(sets) > 1 and any(plan is not None and plan.step.rows for plan in plans)
        answers = await asyncio.gather(
            *(self._compute(one, plan, joint) for one, plan in zip(sets, plans, strict=True))
        )
        for one, plan, done in zip(sets, plans, answers, strict=True):
            if plan is not None:
                one.complete(plan, done.sampled, done.compute_s)

    async def _compute(self, one: ReplicaSet, plan: StepPlan | None, joint: bool) -> StepDone:
        """One set's step on all its ranks; the first samples, and its answer counts."""
        step = plan.step if plan is not None else Step(number=0, release=[], start=[], rows=[])
        if joint:
            step = msgspec.structs.replace(step, joint=True)
        elif not (step.rows or step.release):  # nothing, or only cached prefixes to send: the executors have no part
            return StepDone(number=step.number, sampled=[], compute_s=0.0)
        done = await self._ask(one, step, Asked(f"step {step.number}", "step_s", self._limits.step_s))
        self._metrics.steps.labels(one.name).inc()
        self._metrics.step_compute.labels(self.role).observe(done.compute_s)
        return done

    async def _ask(self, one: ReplicaSet, step: Step, asked: Asked) -> StepDone:
        """Raises ReplicaFailed when a rank of the set does not answer in time, or cannot."""
        first = self.sets.index(one) * self._parallel.tp
        ranks = self._ranks[first : first + self._parallel.tp]
        one.asked, one.asked_at_s = asked, self._clock.now_s()
        try:
            done, *_ = await _within(asked.limit_s, asyncio.gather(*(rank.handle.step(step) for rank in ranks)))
        except TimeoutError:
            raise ReplicaFailed(
                f"{asked.what} of {one.name} took longer than limits.{asked.limit} ({asked.limit_s:g} s): an executor "
                f"is stuck ({', '.join(f'pid {rank.handle.pid}' for rank in ranks)})"
            ) from None
        one.asked = None
        return done


async def _within(limit_s: float, answers: asyncio.Future[list[StepDone]]) -> list[StepDone]:
    """Raises TimeoutError. Counts beats of its own: while this daemon itself stood still, nobody was late."""
    try:
        for _ in range(_NUM_BEATS):
            done, _ = await asyncio.wait((answers,), timeout=limit_s / _NUM_BEATS)
            if done:
                return answers.result()
        raise TimeoutError
    finally:
        if answers.cancel():
            await asyncio.gather(answers, return_exceptions=True)


async def _start_ranks(
    name: ReplicaName, config: ReplicaConfig, model: PackedModel, run_dir: Path, load_s: float
) -> list[Rank]:
    """All executors at once: they find each other before they are ready."""
    rendezvous = run_dir / f"{name.replace('/', '-')}.rendezvous"
    rendezvous.unlink(missing_ok=True)  # of an earlier life
    configs = executor_configs(name, config, model, str(rendezvous))
    starts = [asyncio.create_task(ExecutorHandle.start(one)) for one in configs]
    try:
        try:
            async with asyncio.timeout(load_s):
                return [Rank(handle) for handle in await asyncio.gather(*starts)]
        except TimeoutError:
            raise ReplicaFailed(
                f"the executors of {name} did not load within limits.load_s ({load_s:g} s): one is stuck, or the limit "
                f"is too short for the model"
            ) from None
    except BaseException:
        for start in starts:
            start.cancel()
        for started in await asyncio.gather(*starts, return_exceptions=True):
            if isinstance(started, ExecutorHandle):
                await started.stop()
        raise
    finally:
        rendezvous.unlink(missing_ok=True)


def _open_fabric(
    one: ReplicaSet, ranks: list[Rank], fabric: Fabric, hosts: tuple[tuple[str, ...], ...], progress_cores: CpuLists
) -> None:
    """A port for each rank, over its NICs. Raises PddError or OSError, with none of them left open."""
    ports: list[LibfabricPort] = []
    copies = fabric.same_host is SameHost.COPY
    try:
        for of_rank, cores in zip(hosts, progress_cores, strict=True):
            port = LibfabricPort.open(fabric.provider, of_rank, spin_us=fabric.spin_us, copies=copies, cores=cores)
            ports.append(port)
        one.gigabytes_per_s = measure(ports[0])
        one.open_fabric(ports, MessengerGroup(one.shape, _messengers(one, ranks, ports)), [it.arena for it in ranks])
    except BaseException:
        for port in ports:
            port.close()
        raise
    info = ports[0].info
    same_host = SameHost.COPY if info.copies else SameHost.FABRIC
    log.info("fabric up", replica=one.name, ranks=len(ports), nics=info.num_nics, provider=info.provider,
             libfabric=info.library_version, same_host=str(same_host), gigabytes_per_s=one.gigabytes_per_s,
             fences=info.fences)  # fmt: skip


def _messengers(one: ReplicaSet, ranks: list[Rank], ports: list[LibfabricPort]) -> list[Messenger]:
    """One for each rank. All of a prefiller wait for the lead rank's layers: it counts for the whole set."""
    counter, wakes = ranks[0].counter, ranks[0].wakes
    messengers = []
    for number, (rank, port) in enumerate(zip(ranks, ports, strict=True)):
        watch = None
        if one.role is Role.PREFILL and counter is not None:
            watch = port.watch(counter.address, wakes[number].fd)
        messengers.append(Messenger(port, rank.layout, rank.arena.address, watch, arena_fd=rank.arena.fd))
    return messengers


def try_fabric(config: ReplicaConfig, fabric: Fabric, hosts: tuple[tuple[str, ...], ...]) -> None:
    """At a daemon's start: a provider that is not there is told of before a model is loaded for minutes. Raises
    FabricUnavailable."""
    for of_rank in hosts if config.role is not Role.COLOCATED else ():
        LibfabricPort.open(fabric.provider, of_rank, spin_us=0, copies=False).close()


async def _exit_of(handle: ExecutorHandle) -> PddError:
    return ReplicaFailed(f"executor {handle.name} (pid {handle.pid}) ended: {await handle.wait_for_exit()}")


async def _breakage_of(one: ReplicaSet) -> PddError:
    await one.broken.wait()
    return ReplicaFailed(f"a fabric endpoint of {one.name} is broken")
