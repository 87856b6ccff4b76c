"""One rank as its daemon sees it: an executor process and the memory that the two share."""

from __future__ import annotations

import os

from pdd.base.ids import ReplicaName
from pdd.engine.handle import ExecutorHandle
from pdd.engine.pack import PackedModel
from pdd.engine.protocol import ExecutorConfig
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout
from pdd.topology.model import Replica as ReplicaConfig


class Rank:
    """Owns the executor's handle and the mappings; `close` gives both back."""

    def __init__(self, handle: ExecutorHandle) -> None:
        self.handle = handle
        self.layout: KvLayout = handle.ready.layout
        self.arena = Arena.map(handle.arena_fd, self.layout)
        self.counter = LayerCounter.map(handle.counter_fd) if handle.counter_fd is not None else None
        """Of the lead rank of a set: it counts for all of them."""
        self.wakes = tuple(WakeFd(fd) for fd in handle.wake_fds)
        """Of the lead rank: one for each port of the set."""

    async def close(self) -> None:
        """Ends the executor. The ports that know the arena must be closed already."""
        await self.handle.stop()
        self.arena.close()
        if self.counter is not None:
            self.counter.close()
        for wake in self.wakes:
            wake.close()


def executor_configs(
    name: ReplicaName, config: ReplicaConfig, model: PackedModel, rendezvous: str
) -> list[ExecutorConfig]:
    """What the topology says of a replica, as each of its executors wants to hear it, in the order of ranks."""
    parallel, num_ranks = config.parallel, config.parallel.num_ranks
    shares = [_share(config.cores, rank, num_ranks) for rank in range(num_ranks)]
    return [
        ExecutorConfig(
            replica=name,
            rank=rank,
            tp=parallel.tp,
            dp=parallel.dp,
            ep=parallel.ep,
            rendezvous=rendezvous,
            role=config.role,
            model_dir=str(model.dir),
            dtype=model.dtype,
            page_tokens=config.page_tokens,
            kv_bytes=config.kv_bytes,
            chunk_tokens=config.chunk_tokens,
            max_sequences=config.max_sequences,
            cores=cores,
            num_wakes=parallel.tp,
            threads=config.threads or max(1, (len(cores) or os.cpu_count() or 1) // (1 if cores else num_ranks)),
        )
        for rank, cores in enumerate(shares)
    ]


def _share(cores: tuple[int, ...], rank: int, num_ranks: int) -> tuple[int, ...]:
    """A rank's part of the replica's cores: an even, contiguous split; where there are too few, all share all."""
    if len(cores) < num_ranks:
        return cores
    return cores[rank * len(cores) // num_ranks : (rank + 1) * len(cores) // num_ranks]
