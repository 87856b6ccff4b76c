"""How a replica set's ranks share one KV cache: which KV heads each tensor-parallel rank holds.

`tp` ranks hold `num_kv_heads` heads of a layer together. Where there are more ranks than heads, neighbours hold the
same one (MLA's latent counts as one head, so every rank holds all of it):

    tp 2, 4 heads        tp 4, 2 heads          tp 4, latent
    rank 0: 0 1          rank 0, 1: 0           rank 0 ... 3: 0
    rank 1: 2 3          rank 2, 3: 1
"""

from __future__ import annotations

import hashlib

import msgspec

from pdd.memory.layout import DTYPE_BYTES, KvLayout

MOST = {"tp": 128, "page_tokens": 256}
"""What the topology allows: planning takes time for each."""


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

    def digest(self) -> str:
        """16 hex digits over everything that decides which bytes of a page are whose (so not `num_pages`)."""
        return hashlib.sha256(repr((self.tp, self.num_kv_heads, self.layout.digest())).encode()).hexdigest()[:16]

    def problems(self) -> tuple[str, ...]:
        """Why it is no shape at all, a sentence each: a peer may claim anything. Empty: it is one."""
        layout = self.layout
        sizes = {
            "tp": self.tp,
            "num_kv_heads": self.num_kv_heads,
            "layout.num_kv_heads": layout.num_kv_heads,
            "head_dim": layout.head_dim,
            "page_tokens": layout.page_tokens,
            "num_layers": layout.num_layers,
            "num_planes": layout.num_planes,
            "num_pages": layout.num_pages,
        }
        found = [f"{name}: {value} is below 1" for name, value in sizes.items() if value < 1]
        found += [f"{name}: {sizes[name]} is above {most}" for name, most in MOST.items() if sizes[name] > most]
        if layout.dtype not in DTYPE_BYTES:
            found.append(f"dtype: {layout.dtype[:20]} is none of {', '.join(DTYPE_BYTES)}")
        if found:
            return tuple(found)
        try:
            num_held = len(self.heads_of(0))
        except ValueError as error:
            return (str(error),)
        if num_held != layout.num_kv_heads:
            return (f"layout.num_kv_heads: {layout.num_kv_heads}, but tp {self.tp} of {self.num_kv_heads}: {num_held}",)
        return ()
