"""One local replica: its executor, its pages, its scheduler, its fabric port, and the loop that turns them.

The requests themselves belong to its side (decode.py or prefill.py); the replica only carries them through steps.
"""

from __future__ import annotations

import asyncio
import os
from typing import Protocol

import structlog

from pdd.base.clock import Clock
from pdd.base.errors import PddError, ReplicaFailed
from pdd.base.ids import ReplicaName, RequestId, SequenceId
from pdd.daemon.metrics import Metrics
from pdd.engine.admission import Admission, Admitted
from pdd.engine.handle import ExecutorHandle
from pdd.engine.pack import PackedModel
from pdd.engine.plan import Outcome, Removed, StepPlan
from pdd.engine.protocol import ExecutorConfig, StepDone
from pdd.engine.scheduler import Scheduler
from pdd.engine.sequence import Sequence
from pdd.fabric.libfabric import LibfabricPort, measure
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.pool import Allocation, PagePool
from pdd.topology.model import Fabric, Limits, Role
from pdd.topology.model import Replica as ReplicaConfig
from pdd.transfer.messenger import Messenger, PortBroken, TransferEvent
from pdd.wire.messages import RankInfo, ReplicaInfo, ReplicaLoad

log = structlog.get_logger(__name__)


class StepUser(Protocol):
    """The side whose requests the replica computes."""

    def admit(self) -> None: ...

    def planned(self, plan: StepPlan) -> None: ...

    def computed(self, plan: StepPlan, seconds: float) -> None: ...

    def outcome(self, outcome: Outcome) -> None: ...

    def transferred(self, event: TransferEvent) -> None: ...

    def failed(self, error: PddError) -> None: ...


class SharedMemory:
    """What an executor shares with its daemon."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.arena = Arena.map(handle.arena_fd, handle.ready.layout)
        self.counter = LayerCounter.map(handle.counter_fd)
        self.wake = WakeFd(handle.wake_fd)

    def close(self) -> None:
        self.arena.close()
        self.counter.close()
        self.wake.close()


class Replica:
    """Made by `start`; `user` must be set before `run`."""

    user: StepUser

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        model: PackedModel,
        handle: ExecutorHandle,
        *,
        max_sequence_tokens: int,
        max_queue: int,
        clock: Clock,
        metrics: Metrics,
    ) -> None:
        self.name = name
        self.role = config.role
        self.layout = handle.ready.layout
        self.failure: str | None = None
        self.gigabytes_per_s: float | None = None
        self.num_steps = 0
        self._config = config
        self._model = model
        self._handle = handle
        self._clock = clock
        self._metrics = metrics
        self._memory = SharedMemory(handle)
        self._messenger: Messenger | None = None
        self._port: LibfabricPort | None = None
        self._work = asyncio.Event()
        self._port_broken = asyncio.Event()
        self._leaving: set[RequestId] = set()
        """Ended requests whose pages a running step still uses."""
        self._num_sequences = 0
        self.pool = PagePool(self.layout.num_pages, self.layout.page_tokens, config.prefix_cache)
        self.admission = Admission(
            self.pool,
            max_sequences=config.max_sequences,
            max_queue=max_queue,
            growth_pages=0 if self.role is Role.PREFILL else 1,
        )
        self.scheduler = Scheduler(
            self.pool,
            num_layers=self.layout.num_layers,
            chunk_tokens=config.chunk_tokens,
            max_sequence_tokens=max_sequence_tokens,
        )

    @classmethod
    async def start(
        cls,
        name: ReplicaName,
        config: ReplicaConfig,
        model: PackedModel,
        *,
        host: str,
        fabric: Fabric,
        limits: Limits,
        max_sequence_tokens: int,
        clock: Clock,
        metrics: Metrics,
    ) -> Replica:
        """Starts the executor, waits for its model, and opens the fabric. Raises PddError."""
        handle = await ExecutorHandle.start(executor_config(name, config, model))
        replica = cls(
            name, config, model, handle,
            max_sequence_tokens=max_sequence_tokens, max_queue=limits.max_queue, clock=clock, metrics=metrics,
        )  # fmt: skip
        if config.role is not Role.COLOCATED:
            try:
                replica._open_fabric(fabric, host)
            except PddError:
                await replica.stop()
                raise
        log.info("replica up", replica=name, role=str(config.role), pages=replica.layout.num_pages,
                 page_bytes=replica.layout.page_bytes, load_s=round(handle.ready.load_s, 3))  # fmt: skip
        return replica

    def _open_fabric(self, fabric: Fabric, host: str) -> None:
        port = self._port = LibfabricPort.open(fabric.provider, host, fabric.spin_us)
        self.gigabytes_per_s = measure(port)
        log.info("fabric up", replica=self.name, provider=port.info.provider, libfabric=port.info.library_version,
                 gigabytes_per_s=self.gigabytes_per_s, fences=port.info.fences)  # fmt: skip
        watch = None
        if self.role is Role.PREFILL:
            watch = port.watch(self._memory.counter.address, self._memory.wake.fd)
        self._messenger = Messenger(port, self.layout, self._memory.arena.address, watch)
        asyncio.get_running_loop().add_reader(port.fileno(), self.poll)

    # For its side.

    @property
    def messenger(self) -> Messenger:
        """Only replicas that hand off or take over have one: not colocated ones."""
        assert self._messenger is not None, self.name
        return self._messenger

    def schedule(
        self,
        prompt: tuple[int, ...],
        request: RequestId,
        sampling: SamplingParams | None,
        allocation: Allocation,
        num_computed: int,
    ) -> None:
        """Gives a sequence to the scheduler; `sampling` None: it ends with the KV of its prompt."""
        self._num_sequences += 1
        self.scheduler.add(
            Sequence(
                id=SequenceId(self._num_sequences),
                request=request,
                prompt=prompt,
                sampling=sampling,
                pages=list(allocation.pages),
                num_cached=allocation.num_cached_tokens,
                num_computed=num_computed,
            )
        )
        self._work.set()

    def admit(self) -> list[Admitted]:
        return self.admission.admit(self.scheduler.num_wanted_pages)

    def retire(self, request: RequestId) -> None:
        """The request has ended: its pages return, at once or after the step that uses them."""
        if self.admission.withdraw(request):
            return  # it never had any
        if self.scheduler.remove(request):
            self._leaving.add(request)
        else:
            self._free(request)

    def _free(self, request: RequestId) -> None:
        self.pool.release(request)
        if request in self.pool.quarantines():
            self.pool.absolve(request)
        self.admission.release_slot(request, self._clock.now_s())
        self.user.admit()
        self._work.set()

    # The loop.

    async def run(self) -> PddError:
        """Steps for as long as the executor lives; returns why it ended."""
        ways = [
            asyncio.create_task(way) for way in (self._turn_for_ever(), self._executor_exit(), self._port_failure())
        ]
        try:
            done, _ = await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
            error = next(task for task in ways if task in done).result()
        finally:
            for task in ways:
                task.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
        self.failure = str(error)
        log.error("replica failed", replica=self.name, error=self.failure)
        self.user.failed(error)
        return error

    async def _turn_for_ever(self) -> PddError:
        try:
            while True:
                plan = self.scheduler.schedule()
                if plan is None:
                    self._work.clear()
                    await self._work.wait()
                    continue
                self.user.planned(plan)
                done = await self._compute(plan)
                self.user.computed(plan, done.compute_s)
                for outcome in self.scheduler.complete(plan, done.sampled):
                    self._settle(outcome)
        except PddError as error:
            return error

    async def _executor_exit(self) -> PddError:
        return ReplicaFailed(
            f"executor of {self.name} (pid {self._handle.pid}) ended: {await self._handle.wait_for_exit()}"
        )

    async def _port_failure(self) -> PddError:
        await self._port_broken.wait()
        return ReplicaFailed(f"the fabric endpoint of {self.name} is broken")

    async def _compute(self, plan: StepPlan) -> StepDone:
        step = plan.step
        if not (step.rows or step.release):  # only cached prefixes to send: the executor has no part in it
            return StepDone(number=step.number, sampled=[], compute_s=0.0)
        done = await self._handle.step(step)
        self.num_steps += 1
        self._metrics.steps.labels(self.name).inc()
        self._metrics.step_compute.labels(self.role).observe(done.compute_s)
        return done

    def _settle(self, outcome: Outcome) -> None:
        if isinstance(outcome, Removed):
            self._leaving.discard(outcome.request)
            self._free(outcome.request)
        else:
            self.user.outcome(outcome)

    def poll(self) -> None:
        """Takes what the fabric has to say; called by the event loop when its descriptor is readable."""
        if self._messenger is not None:
            for event in self._messenger.poll():
                if isinstance(event, PortBroken):
                    self._port_broken.set()
                else:
                    self.user.transferred(event)

    async def stop(self) -> None:
        """Closes the port before the memory that it may write to. Idempotent."""
        if self._port is not None and self._messenger is not None:
            asyncio.get_running_loop().remove_reader(self._port.fileno())
            self._messenger.close()
            self._messenger = self._port = None
        await self._handle.stop()
        self._memory.close()

    # What others may know.

    @property
    def provider(self) -> str:
        return self._port.info.provider if self._port else ""

    def info(self) -> ReplicaInfo:
        ports = () if self._port is None else (self._port,)
        ranks = tuple(RankInfo(rank=rank, fabric_provider=port.info.provider) for rank, port in enumerate(ports))
        return ReplicaInfo(
            name=self.name,
            role=self.role,
            model_digest=self._model.digest,
            layout=self.layout,
            ranks=ranks,
            max_sequences=self._config.max_sequences,
        )

    def problems(self) -> list[str]:
        """What the invariant checkers find wrong; empty when all is well."""
        return self.pool.check() + (self._messenger.check() if self._messenger is not None else [])

    def load(self, draining: bool) -> ReplicaLoad:
        return ReplicaLoad(
            name=self.name,
            ready=self.failure is None and not draining,
            free_pages=self.pool.available,
            num_queued=self.admission.num_waiting,
            num_running=self.admission.num_admitted,
            queued_tokens=self.admission.num_waiting_tokens + self.scheduler.num_prefill_tokens,
        )


def executor_config(name: ReplicaName, config: ReplicaConfig, model: PackedModel) -> ExecutorConfig:
    """What the topology says of a replica, as its executor wants to hear it."""
    return ExecutorConfig(
        replica=name,
        rank=0,
        role=config.role,
        model_dir=str(model.dir),
        dtype=model.dtype,
        page_tokens=config.page_tokens,
        kv_bytes=config.kv_bytes,
        chunk_tokens=config.chunk_tokens,
        max_sequences=config.max_sequences,
        cores=config.cores,
        threads=config.threads or len(config.cores) or os.cpu_count() or 1,
    )
