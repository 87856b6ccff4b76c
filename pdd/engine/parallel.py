"""What the ranks of one replica say to each other while they compute: collectives over torch.distributed.

A replica has `dp` sets of `tp` ranks, rank = dp_rank * tp + tp_rank. Within a set each rank computes with its part of
every layer (sharding.py) and `all_reduce` adds the parts up. With expert parallelism all ranks of the replica form one
more group, in which tokens travel to the ranks that hold their experts and back (`exchange`).

          tp_rank 0   1          every rank of a group calls the same collectives in the same order with the same
    dp_rank 0  [ 0    1 ]        shapes (of `exchange`: with counts that agree); a rank without work calls them
    dp_rank 1  [ 2    3 ]        with no rows
               ep: all four

Between CPU ranks gloo runs over the loopback interface, between GPUs NCCL.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from pdd.base.errors import OperatorError, ReplicaFailed
from pdd.engine.protocol import ExecutorConfig

JOIN_S = 300.0
"""For all ranks to appear: each imports torch first, on a busy machine one after the other."""
COLLECTIVE_S = 60.0
"""For all ranks to reach a collective: far more than a step takes. A dead rank is noticed at once, a hung one then."""


class Parallel:
    """One rank's place in its replica. Made by `solo` or `join`; the collectives of a group of one do nothing."""

    def __init__(
        self,
        name: str,
        rank: int,
        shape: tuple[int, int, int],
        device: torch.device,
        groups: tuple[dist.ProcessGroup | None, dist.ProcessGroup | None],
    ) -> None:
        self.tp, self.dp, self.ep = shape
        self.dp_rank, self.tp_rank = divmod(rank, self.tp)
        self.ep_rank = rank if self.ep > 1 else 0
        self._name = name
        self._device = device
        self._tp_group, self._ep_group = groups
        self._token = torch.zeros(1, device=device)

    @classmethod
    def solo(cls) -> Parallel:
        """A rank that shares no layer with any other."""
        return cls("the only rank", 0, (1, 1, 1), torch.device("cpu"), (None, None))

    @classmethod
    def join(cls, config: ExecutorConfig, device: torch.device) -> Parallel:
        """Meets the other ranks by the file `config.rendezvous`, which must not be left over from an earlier start.

        Ranks that share no layer (tp 1 and ep 1) need not meet. Raises OperatorError where ranks stay away.
        """
        if config.tp == 1 and config.ep == 1:
            return cls.solo()
        # Ranks of a replica are on one node. Without this gloo looks up the host's name, which may not resolve or may
        # lead to an address of another network namespace, and listens on it.
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        name, num_ranks = f"{config.replica} rank {config.rank}", config.dp * config.tp
        backend = "nccl" if device.type == "cuda" else "gloo"
        store = _meet(name, num_ranks, config)
        try:
            dist.init_process_group(
                backend,
                store=store,
                rank=config.rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=COLLECTIVE_S),
                device_id=device if device.type == "cuda" else None,
            )
            tp_group = None
            for first in range(0, num_ranks, config.tp):  # every rank has to take part in making every group
                group = dist.new_group(list(range(first, first + config.tp)), timedelta(seconds=COLLECTIVE_S))
                if first <= config.rank < first + config.tp:
                    tp_group = group
        except RuntimeError as error:
            raise OperatorError(
                f"{name}: cannot connect to the replica's other {num_ranks - 1} ranks by {backend} ({_reason(error)}); "
                "see whether one of them failed, and whether the loopback interface is up (ip link show lo)"
            ) from error
        ours = (tp_group if config.tp > 1 else None, dist.group.WORLD if config.ep > 1 else None)
        return cls(name, config.rank, (config.tp, config.dp, config.ep), device, ours)

    @property
    def is_lead(self) -> bool:
        """Whether this rank samples, and raises the layer counter that matters, for its set."""
        return self.tp_rank == 0

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of `x` over the set's ranks, in place and the same to the bit on all of them. `x`: contiguous."""
        if self._tp_group is not None and len(x):
            with self._explained("all-reduce"):
                dist.all_reduce(x, group=self._tp_group)
        return x

    def synchronise(self) -> None:
        """Returns when all ranks of the set have come here: the smallest all-reduce there is."""
        self.all_reduce(self._token)

    def gather_vocabulary(self, logits: torch.Tensor, vocab_size: int) -> torch.Tensor | None:
        """From each rank's [rows, its part of the vocabulary] the whole [rows, vocab_size], on the lead; elsewhere
        None. Parts are those of sharding.vocabulary_of."""
        if self._tp_group is None:
            return logits
        share = -(-vocab_size // self.tp)  # gather takes equal shapes: short parts are padded
        padded = torch.nn.functional.pad(logits, (0, share - logits.shape[1])).contiguous()
        parts = [torch.empty_like(padded) for _ in range(self.tp)] if self.is_lead else None
        with self._explained("gather of the logits"):
            dist.gather(padded, parts, group=self._tp_group, group_dst=0)
        return torch.cat(parts, dim=1)[:, :vocab_size] if parts else None

    def exchange_counts(self, counts: list[int]) -> list[int]:
        """How many rows each of the `ep` ranks has for us, where `counts` says how many we have for each."""
        if self._ep_group is None:
            return counts
        received = torch.empty(self.ep, dtype=torch.int64, device=self._device)
        with self._explained("exchange of counts"):
            dist.all_to_all_single(received, torch.tensor(counts, device=self._device), group=self._ep_group)
        return received.tolist()

    def exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        """Rows change places among the `ep` ranks: the first `send[0]` go to rank 0, and so on; the result holds
        `receive[0]` rows from rank 0 first, and so on.

            dispatch   receive = exchange_counts(send);  theirs = exchange(rows, send, receive)
            combine    back = exchange(computed, receive, send)       in the order in which `rows` were

        `rows`: contiguous [sum(send), ...]. Any counts may be 0, but every rank must take part.
        """
        if self._ep_group is None:
            return rows
        received = rows.new_empty(sum(receive), *rows.shape[1:])
        with self._explained("exchange of tokens"):
            dist.all_to_all_single(received, rows, receive, send, group=self._ep_group)
        return received

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ReplicaFailed(
                f"{self._name}: another rank of the replica died or stopped in the {what}: {_reason(error)}"
            ) from error


def _meet(name: str, num_ranks: int, config: ExecutorConfig) -> FileStore:
    """Returns when all ranks are there. torch would wait, too, but no longer than for any other collective."""
    try:
        store = FileStore(config.rendezvous, num_ranks)
        store.set(f"here/{config.rank}", "")
        store.wait([f"here/{rank}" for rank in range(num_ranks)], timedelta(seconds=JOIN_S))
    except RuntimeError as error:
        raise OperatorError(
            f"{name}: the replica's {num_ranks} ranks did not all come to {config.rendezvous} within {JOIN_S:g} s "
            f"({_reason(error)}); see why the others did not start"
        ) from error
    return store


def _reason(error: RuntimeError) -> str:
    """The first line, without the place in gloo's source before it and the advice after it."""
    line = str(error).partition("\n")[0]
    return re.sub(r"^\[[^]]*] *", "", line).partition(". This is typically")[0]
