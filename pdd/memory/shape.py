"""How a replica set's ranks share one KV cache: which KV heads each tensor-parallel rank holds.

`tp` ranks hold `num_kv_heads` heads of a layer together. Where there are more ranks than heads, neighbours hold the
same one (MLA's latent counts as one head, so every rank holds all of it):

    tp 2, 4 heads        tp 4, 2 heads          tp 4, latent
    rank 0: 0 1          rank 0, 1: 0           rank 0 ... 3: 0
    rank 1: 2 3          rank 2, 3: 1
"""

from __future__ import annotations

import msgspec

from pdd.memory.layout import KvLayout


def heads_of(rank: int, tp: int, num_kv_heads: int) -> range:
    """The KV heads of a rank. Raises ValueError, naming both numbers, where they do not divide."""
    if num_kv_heads % tp and tp % num_kv_heads:
        raise ValueError(f"tp {tp} and {num_kv_heads} KV heads: neither divides the other")
    if tp <= num_kv_heads:
        size = num_kv_heads // tp
        return range(rank * size, (rank + 1) * size)
    head = rank * num_kv_heads // tp
    return range(head, head + 1)


class KvShape(msgspec.Struct, frozen=True, kw_only=True):
    """One replica set's cache: `tp` arenas of the same layout."""

    tp: int
    num_kv_heads: int
    """Of the model."""
    layout: KvLayout
    """Of each rank."""

    def heads_of(self, rank: int) -> range:
        return heads_of(rank, self.tp, self.num_kv_heads)

    def ranks_with(self, head: int) -> list[int]:
        """All ranks that hold a head, in order."""
        return [rank for rank in range(self.tp) if head in self.heads_of(rank)]
