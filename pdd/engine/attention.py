"""The paged KV cache as a model sees it: store a step's K and V, attend to what is stored.

A step's plan is made once and used by every layer. Rows of few tokens go through the C kernel, which reads pages in
place, one query at a time; longer ones (prefill chunks) gather their pages once a layer and use torch's fused kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import scaled_dot_product_attention

from pdd._attention import ffi, lib
from pdd.engine.runner import BatchRow
from pdd.memory.arena import Arena

_FEW_TOKENS = 3
"""Rows of at most so many tokens are single queries: gathering costs about as much as three passes over the pages."""
_BLOCK_TOKENS = 256
"""Queries of a chunk that share one mask."""

_ELEMENTS = {torch.float32: lib.PDD_FLOAT32, torch.bfloat16: lib.PDD_BFLOAT16}


@dataclass(frozen=True)
class Queries:
    """Tokens that attend one by one: token i of the step's tensor `indices[i]`, over `lengths[i]` positions."""

    indices: list[int]
    page_tables: npt.NDArray[np.uint64]
    lengths: npt.NDArray[np.int32]

    @classmethod
    def of(cls, tokens: list[tuple[int, BatchRow, int]]) -> Queries:
        """From (index in the step, row, number of positions that it sees)."""
        return cls(
            indices=[index for index, _, _ in tokens],
            page_tables=np.array([row.sequence.pages.address for _, row, _ in tokens], np.uint64),
            lengths=np.array([length for _, _, length in tokens], np.int32),
        )


@dataclass(frozen=True)
class Chunk:
    """Consecutive tokens of one sequence: [first, last) of the step, at positions [start, start + last - first)."""

    row: BatchRow
    first: int
    last: int
    masks: list[torch.Tensor]
    """bool [queries of a block, positions up to its end], for each block; none where the chunk starts its sequence."""


class BatchPlan:
    """Where each token of a step is stored and what it sees. Tokens of short rows come first."""

    def __init__(self, rows: list[BatchRow], page_tokens: int) -> None:
        self.rows = sorted(rows, key=lambda row: len(row.tokens) > _FEW_TOKENS)
        self.tokens = torch.tensor([token for row in self.rows for token in row.tokens])
        positions = [np.arange(row.start, row.end, dtype=np.int32) for row in self.rows]
        self.positions = np.concatenate(positions)
        self.slots = np.concatenate(
            [
                row.sequence.pages.first(-(-row.end // page_tokens))[at // page_tokens] * page_tokens + at % page_tokens
                for row, at in zip(self.rows, positions, strict=True)
            ]
        ).astype(np.int32)
        firsts = np.cumsum([0, *(len(row.tokens) for row in self.rows)]).tolist()
        placed = list(zip(self.rows, firsts, firsts[1:], strict=False))
        self.queries = Queries.of(
            [
                (first + i, row, row.start + i + 1)
                for row, first, last in placed
                if last - first <= _FEW_TOKENS
                for i in range(last - first)
            ]
        )
        self.chunks = [
            Chunk(row, first, last, _masks(row)) for row, first, last in placed if last - first > _FEW_TOKENS
        ]
        self.sampled_rows = [row for row in self.rows if row.sample]
        self.sampled = Queries.of([(last - 1, row, row.end) for row, _, last in placed if row.sample])


def _masks(row: BatchRow) -> list[torch.Tensor]:
    """Block by block, so that a long chunk needs no mask of all its queries by all its positions."""
    if row.start == 0:
        return []
    return [
        torch.ones(min(first + _BLOCK_TOKENS, row.end) - first, min(first + _BLOCK_TOKENS, row.end), dtype=torch.bool)
        .tril_(first)
        for first in range(row.start, row.end, _BLOCK_TOKENS)
    ]  # fmt: skip


@dataclass(frozen=True)
class HeadNorm:
    """RMS norm of each head's q and k before they are rotated. Weights: [head_dim], of the cache's dtype."""

    q: torch.Tensor
    k: torch.Tensor
    epsilon: float


class PagedAttention:
    """Attention of one rank over its arena. Every method works on one layer of one step.

    `rope_table` is float32 [positions, head_dim] (models/rope.py).
    """

    def __init__(
        self, arena: Arena, dtype: torch.dtype, num_heads: int, rope_table: torch.Tensor, threads: int
    ) -> None:
        layout = arena.layout
        self._arena = arena  # the caches below are addresses in its mapping
        self._layout = layout
        self._dtype = dtype
        self._num_heads = num_heads
        self._group = num_heads // layout.num_kv_heads
        self._rope_table = rope_table
        self._scale = 1.0 / math.sqrt(layout.head_dim)
        shape = (num_heads, layout.num_kv_heads, layout.page_tokens, layout.head_dim)
        self._caches = [
            ffi.new(
                "struct pdd_cache *",
                (arena.address + layout.offset_bytes(layer, 0), _ELEMENTS[dtype], *shape, lib.PDD_ISA_BEST, threads),
            )
            for layer in range(layout.num_layers)
        ]

    def store(self, layer: int, plan: BatchPlan, qkv: torch.Tensor, norm: HeadNorm | None) -> None:
        """Norm (if any) and rotate q and k of `qkv` [tokens, (heads + 2 kv_heads) * head_dim] in place; store k, v."""
        weights = (norm.q.data_ptr(), norm.k.data_ptr()) if norm else (0, 0)
        rotation = ffi.new(
            "struct pdd_rotation *", (*weights, self._rope_table.data_ptr(), norm.epsilon if norm else 0.0)
        )
        lib.pdd_store(
            self._caches[layer], rotation, qkv.data_ptr(), len(qkv), plan.positions.ctypes.data, plan.slots.ctypes.data
        )

    def attend(self, layer: int, plan: BatchPlan, qkv: torch.Tensor) -> torch.Tensor:
        """What each token of the step sees, after `store`: [tokens, heads * head_dim]."""
        num_queries = len(plan.queries.indices)
        if not plan.chunks:
            return self.attend_queries(layer, plan.queries, qkv)
        out = torch.empty(len(qkv), self._num_heads * self._layout.head_dim, dtype=self._dtype)
        if num_queries:
            out[:num_queries] = self.attend_queries(layer, plan.queries, qkv[:num_queries])
        for chunk in plan.chunks:
            self._attend_chunk(layer, chunk, qkv[chunk.first : chunk.last], out[chunk.first : chunk.last])
        return out

    def attend_queries(self, layer: int, queries: Queries, qkv: torch.Tensor) -> torch.Tensor:
        """qkv: the rows of these queries, contiguous, in their order. [queries, heads * head_dim]."""
        out = torch.empty(len(qkv), self._num_heads * self._layout.head_dim)
        lib.pdd_decode(
            self._caches[layer],
            qkv.data_ptr(),
            qkv.stride(0),
            len(qkv),
            queries.page_tables.ctypes.data,
            queries.lengths.ctypes.data,
            self._scale,
            out.data_ptr(),
        )
        return out.to(self._dtype)

    def _attend_chunk(self, layer: int, chunk: Chunk, qkv: torch.Tensor, out: torch.Tensor) -> None:
        """Heads of one KV head are a batch of their own, so that K and V are shared among them without a copy."""
        kv_heads, group, head_dim = self._layout.num_kv_heads, self._group, self._layout.head_dim
        heads = qkv.view(len(qkv), -1, head_dim)
        q = heads[:, : self._num_heads].view(-1, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        into = out.view(len(qkv), kv_heads, group, head_dim).permute(1, 2, 0, 3)
        if not chunk.masks:
            k, v = heads[:, self._num_heads :].view(-1, 2, kv_heads, head_dim).permute(1, 2, 0, 3)
        else:
            k, v = self._gather(layer, chunk.row)
        k, v = (one[:, None].expand(-1, group, -1, -1) for one in (k, v))
        if not chunk.masks:
            into.copy_(scaled_dot_product_attention(q, k, v, is_causal=True))
            return
        for block, mask in enumerate(chunk.masks):
            first, (num_queries, end) = block * _BLOCK_TOKENS, mask.shape
            last = first + num_queries
            into[:, :, first:last] = scaled_dot_product_attention(
                q[:, :, first:last], k[:, :, :end], v[:, :, :end], attn_mask=mask
            )

    def _gather(self, layer: int, row: BatchRow) -> torch.Tensor:
        """K and V of a sequence up to the row's end: [2, kv_heads, positions, head_dim]."""
        gathered = torch.empty(2, self._layout.num_kv_heads, row.end, self._layout.head_dim, dtype=self._dtype)
        lib.pdd_gather(self._caches[layer], row.sequence.pages.address, row.end, gathered.data_ptr())
        return gathered
