"""One replica set: tp ranks that hold a whole KV cache together, with that cache's pages, queue and requests.

To peers and to its own side (decode.py, prefill.py) a set is a replica to send work to; only replica.py knows that the
sets of one replica may have to step together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Several
from contextlib import ExitStack
from typing import Protocol

import msgspec

from pdd.base.clock import Clock
from pdd.base.errors import BadRequest, PddError
from pdd.base.ids import ReplicaName, RequestId, SequenceId
from pdd.engine.admission import Admission, Admitted
from pdd.engine.pack import PackedModel
from pdd.engine.plan import Outcome, Removed, StepPlan
from pdd.engine.protocol import Sampled
from pdd.engine.scheduler import Scheduler
from pdd.engine.sequence import Sequence
from pdd.fabric.libfabric import LibfabricPort
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena
from pdd.memory.pool import Allocation, PagePool
from pdd.memory.shape import KvShape
from pdd.topology.model import Replica as ReplicaConfig
from pdd.transfer.events import PortBroken, TransferEvent
from pdd.transfer.group import MessengerGroup
from pdd.transfer.half import TransferCounters
from pdd.wire.admin import NicStatus
from pdd.wire.messages import RankInfo, ReplicaInfo, ReplicaLoad

Digesting = Several[memoryview]
"""The arenas of a set, rank by rank, while they are hashed."""
Digests = tuple[int, ...]


class Asked(msgspec.Struct, frozen=True):
    """What the executors of a set were asked, and which of the topology's limits says how long that may take."""

    what: str
    limit: str
    limit_s: float


class SetUser(Protocol):
    """The side whose requests the set computes."""

    def admit(self) -> None: ...

    def planned(self, plan: StepPlan) -> None: ...

    def computed(self, plan: StepPlan, seconds: float) -> None: ...

    def outcome(self, outcome: Outcome) -> None: ...

    def transferred(self, event: TransferEvent) -> None: ...

    def failed(self, error: PddError) -> None: ...


class ReplicaSet:
    """`user` must be set before anything is scheduled. `work` is set when a step may have become possible."""

    user: SetUser

    def __init__(
        self,
        name: ReplicaName,
        config: ReplicaConfig,
        model: PackedModel,
        shape: KvShape,
        *,
        max_sequence_tokens: int,
        max_queue: int,
        clock: Clock,
        work: asyncio.Event,
    ) -> None:
        self.name = name
        self.role = config.role
        self.shape = shape
        self.layout = shape.layout
        self.failure: str | None = None
        self.gigabytes_per_s: float | None = None
        self.num_steps = 0
        self.asked: Asked | None = None
        """What the executors have not answered yet."""
        self.asked_at_s = 0.0
        self.broken = asyncio.Event()
        """Set when a fabric endpoint of the set is gone for good."""
        self._config = config
        self._model = model
        self._max_sequence_tokens = max_sequence_tokens
        self._clock = clock
        self._work = work
        self._ports: tuple[LibfabricPort, ...] = ()
        self._arenas: tuple[Arena, ...] = ()
        self._messenger: MessengerGroup | None = None
        self._hashing: set[asyncio.Task[None]] = set()
        self._leaving: set[RequestId] = set()
        """Ended requests whose pages a running step still uses."""
        self._num_sequences = 0
        self.pool = PagePool(self.layout.num_pages, self.layout.page_tokens, config.prefix_cache)
        self.admission = Admission(self.pool, max_sequences=config.max_sequences, max_queue=max_queue)
        self.scheduler = Scheduler(
            self.pool,
            num_layers=self.layout.num_layers,
            chunk_tokens=config.chunk_tokens,
            max_sequence_tokens=max_sequence_tokens,
        )

    def open_fabric(self, ports: Several[LibfabricPort], messenger: MessengerGroup, arenas: Several[Arena]) -> None:
        """From now on it can hand off or take over. `ports`, which the messenger owns, and `arenas`: of each rank."""
        self._ports = tuple(ports)
        self._arenas = tuple(arenas)
        self._messenger = messenger
        for fileno in messenger.filenos():
            asyncio.get_running_loop().add_reader(fileno, self.poll)

    # For its side.

    @property
    def messenger(self) -> MessengerGroup:
        """Only sets that hand off or take over have one: not colocated ones."""
        assert self._messenger is not None, self.name
        return self._messenger

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Raises BadRequest for what no executor could run: HTTP lets none of it in, but peers may send anything."""
        if not 0 < len(prompt) <= self._max_sequence_tokens:
            raise BadRequest(f"{len(prompt)} prompt tokens; 1 to {self._max_sequence_tokens} can be run", "prompt")
        vocab_size = self._model.config.vocab_size
        if not 0 <= min(prompt) <= max(prompt) < vocab_size:
            raise BadRequest(f"the prompt has a token id outside the vocabulary of {vocab_size}", "prompt")

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
        if self.admission.withdraw(request) or not self.admission.is_admitted(request):
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

    def poll(self) -> None:
        """Takes what the fabric has to say; called by the event loop when a descriptor is readable."""
        if self._messenger is None:
            return
        for event in self._messenger.poll():
            if isinstance(event, PortBroken):
                self.broken.set()
            else:
                self.user.transferred(event)

    def hash_pages(self, digests: Callable[[Digesting], Digests], then: Callable[[Digests], None]) -> None:
        """Has `digests` read the ranks' arenas in a thread, and calls `then` with what it found."""

        async def hashed() -> None:
            then(await asyncio.to_thread(_over, self._arenas, digests))

        task = asyncio.create_task(hashed())
        self._hashing.add(task)
        task.add_done_callback(self._hashing.discard)

    # For the replica's loop.

    def plan(self) -> StepPlan | None:
        """The next step, announced to whoever must know before it runs."""
        plan = self.scheduler.schedule()
        if plan is not None:
            self.user.planned(plan)
        return plan

    def complete(self, plan: StepPlan, sampled: list[Sampled], seconds: float) -> None:
        self.num_steps += bool(plan.step.rows)
        self.user.computed(plan, seconds)
        for outcome in self.scheduler.complete(plan, sampled):
            if not isinstance(outcome, Removed):
                self.user.outcome(outcome)
            elif outcome.request in self._leaving:  # else its pages are still being read or written by the fabric
                self._leaving.remove(outcome.request)
                self._free(outcome.request)

    def fail(self, error: PddError) -> None:
        self.failure = str(error)
        self.user.failed(error)

    def close(self) -> None:
        """Closes the ports: nothing writes to the ranks' memory any more. Idempotent."""
        if self._messenger is not None:
            for fileno in self._messenger.filenos():
                asyncio.get_running_loop().remove_reader(fileno)
            self._messenger.close()
            self._messenger, self._ports = None, ()

    async def hashed(self) -> None:
        """Waits for the threads that read the ranks' memory."""
        await asyncio.gather(*self._hashing)

    # What others may know.

    @property
    def provider(self) -> str:
        return self._ports[0].info.provider if self._ports else ""

    @property
    def copied_bytes(self) -> int:
        """KV that was copied from prefillers of this machine, since the start."""
        return self.fabric_counters().get("copied_bytes", 0)

    @property
    def failed_copies(self) -> int:
        """Times that a rank's way of copies to a peer was given up, for a while, since the start."""
        return self.fabric_counters().get("failed_copiers", 0)

    def fabric_counters(self) -> dict[str, int]:
        """What the ports of all ranks have counted since they were opened, by name (`messages`, `wakeups`, ...)."""
        counted = [port.statistics() for port in self._ports]
        return {
            name.removeprefix("num_"): sum(one[name] for one in counted) for name in (counted[0] if counted else ())
        }

    @property
    def transfer_counters(self) -> TransferCounters:
        """All zero for those that hand nothing over."""
        return self._messenger.counters if self._messenger is not None else TransferCounters()

    def nics(self) -> tuple[NicStatus, ...]:
        """Of all ranks; empty for those that hand nothing over."""
        return tuple(
            NicStatus(
                rank=rank,
                nic=nic,
                host=host,
                sent_bytes=(counted := port.nic_statistics(nic))["num_bytes"],
                arrived_pieces=counted["num_arrived"],
                failed_paths=counted["num_failed_paths"],
            )
            for rank, port in enumerate(self._ports)
            for nic, host in enumerate(port.hosts)
        )

    def info(self) -> ReplicaInfo:
        return ReplicaInfo(
            name=self.name,
            role=self.role,
            model_digest=self._model.digest,
            shape=self.shape,
            ranks=tuple(
                RankInfo(rank=rank, fabric_provider=port.info.provider) for rank, port in enumerate(self._ports)
            ),
            max_sequences=self._config.max_sequences,
        )

    def problems(self) -> list[str]:
        """What the invariant checkers find wrong; empty when all is well."""
        return self.pool.check() + (self._messenger.check() if self._messenger is not None else [])

    @property
    def silent_s(self) -> float:
        """How long the executors have not answered what they were asked."""
        return self._clock.now_s() - self.asked_at_s if self.asked is not None else 0.0

    def load(self, draining: bool, silence_s: float) -> ReplicaLoad:
        """`silence_s`: executors that have not answered for so long may be stuck."""
        return ReplicaLoad(
            name=self.name,
            ready=self.failure is None and not draining,
            late=self.silent_s > silence_s,
            free_pages=self.pool.available,
            num_queued=self.admission.num_waiting,
            num_running=self.admission.num_admitted,
            queued_tokens=self.admission.num_waiting_tokens + self.scheduler.num_prefill_tokens,
        )


def _over(arenas: Several[Arena], digests: Callable[[Digesting], Digests]) -> Digests:
    """In a thread. No view outlives it, so that the arenas can be closed afterwards."""
    with ExitStack() as views:
        return digests([views.enter_context(arena.buffer()) for arena in arenas])
