"""Multi-head latent attention (arXiv:2405.04434, section 2.1) over a paged cache of latents.

A position's row in the cache is `latent (normed) | rotated key`, the same for all heads. Two ways lead from it to what
a head sees, and which is cheaper depends on how many queries share the positions:

    few queries (decode)      The query is taken to the latents: q_nope @ k_up. Then all heads attend to the rows
                              themselves, whose first part is also the value, and v_up follows afterwards.
    many (a prefill chunk)    K and V of every head are made from the rows once: latent @ k_up', latent @ v_up'.
"""

from __future__ import annotations

import ctypes

import torch
from torch.nn import functional

from pdd._attention import ffi, lib
from pdd.engine.attention import BatchPlan, Chunk, Queries
from pdd.engine.config import Mla
from pdd.engine.models.decoder import Tensors
from pdd.engine.models.layers import Linear, rms_norm
from pdd.memory.arena import Arena

_ELEMENTS = {torch.float32: lib.PDD_FLOAT32, torch.bfloat16: lib.PDD_BFLOAT16}
_EPSILON = 1e-6
"""Of the norms of latents, whatever the model's own is."""


class PagedLatents:
    """The arena of one rank, as rows. Keep `arena` open for as long as this is used.

    `rope_table`: float32 [positions, rope] (rope.py).
    """

    def __init__(
        self, arena: Arena, dtype: torch.dtype, num_heads: int, rope_table: torch.Tensor, threads: int
    ) -> None:
        layout = arena.layout
        self._rope_table = rope_table
        self._page_tokens = layout.page_tokens
        memory = (ctypes.c_char * layout.arena_bytes).from_address(arena.address)
        # [layers, pages, page_tokens, row]
        self._pages = torch.frombuffer(memory, dtype=dtype).view(
            layout.num_layers, layout.num_pages, layout.page_tokens, layout.head_dim
        )
        shape = (num_heads, 1, layout.page_tokens, layout.head_dim, lib.PDD_ISA_BEST, threads, 1)
        self._caches = [
            ffi.new("struct pdd_cache *", (pages.data_ptr(), _ELEMENTS[dtype], *shape)) for pages in self._pages
        ]

    def turns(self, plan: BatchPlan) -> torch.Tensor:
        """What RoPE does to each token: [tokens, rope]."""
        return self._rope_table[torch.from_numpy(plan.positions).long()]

    def store(self, layer: int, plan: BatchPlan, rows: torch.Tensor) -> None:
        self._pages[layer].flatten(0, 1).index_copy_(0, torch.from_numpy(plan.slots).long(), rows)

    def gather(self, layer: int, chunk: Chunk) -> torch.Tensor:
        """The rows of a sequence up to the chunk's end: [positions, row]."""
        num_pages = -(-chunk.row.end // self._page_tokens)
        pages = torch.from_numpy(chunk.row.sequence.pages.first(num_pages)).long()
        return self._pages[layer][pages].flatten(0, 1)[: chunk.row.end]

    def attend(self, layer: int, queries: Queries, q: torch.Tensor, scale: float) -> torch.Tensor:
        """Weighted means of rows, float32, for q [queries, heads, row], contiguous."""
        out = torch.empty(q.shape)
        lib.pdd_decode(
            self._caches[layer],
            q.data_ptr(),
            q.stride(0),
            len(q),
            queries.page_tables.ctypes.data,
            queries.lengths.ctypes.data,
            scale,
            out.data_ptr(),
        )
        return out


class LatentAttention:
    """One layer's attention, of `heads` only; the latents are whole on every rank.

    `tensors`: of that layer (weights/tensors.py).
    """

    def __init__(self, mla: Mla, heads: slice, layer: int, tensors: Tensors, latents: PagedLatents) -> None:
        self._mla = mla
        self._layer = layer
        self._latents = latents
        self._queries = _QueryProjection(mla, tensors, heads)
        self._kv_a = Linear((tensors["kv_a"],), tensors.get("kv_a_bias"))
        self._kv_a_norm = tensors["kv_a_norm"]
        self._k_up, self._v_up = tensors["k_up"][heads], tensors["v_up"][heads]
        self._output = Linear.columns(tensors["output"], tensors.get("output_bias"), _scaled(heads, mla.v_head_dim))

    def store(self, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """The rank's q, with its last part rotated: [tokens, heads, nope + rope]."""
        q, rows = self._queries(x), self._kv_a(x)
        latent, key = rows.tensor_split([self._mla.kv_lora_rank], dim=1)
        latent.copy_(rms_norm(latent, self._kv_a_norm, _EPSILON))
        turn = self._latents.turns(plan)
        _rotate(key, turn)
        _rotate(q[:, :, self._mla.qk_nope_head_dim :], turn[:, None])
        self._latents.store(self._layer, plan, rows)
        return q

    def attend(self, plan: BatchPlan, stored: torch.Tensor) -> torch.Tensor:
        num_queries = len(plan.queries.indices)
        seen = [self._seen_by_queries(plan.queries, stored[:num_queries])] if num_queries else []
        seen += [self._seen_by_chunk(chunk, stored[chunk.first : chunk.last]) for chunk in plan.chunks]
        return self._output(torch.cat(seen))

    def attend_queries(self, queries: Queries, stored: torch.Tensor) -> torch.Tensor:
        return self._output(self._seen_by_queries(queries, stored))

    def _seen_by_queries(self, queries: Queries, q: torch.Tensor) -> torch.Tensor:
        """[queries, heads * v]."""
        mla = self._mla
        q_nope, q_rope = q.tensor_split([mla.qk_nope_head_dim], dim=2)
        absorbed = torch.cat((torch.bmm(q_nope.transpose(0, 1), self._k_up).transpose(0, 1), q_rope), dim=2)
        rows = self._latents.attend(self._layer, queries, absorbed, mla.score_scale)
        latent = rows[:, :, : mla.kv_lora_rank].to(q.dtype)
        return torch.bmm(latent.transpose(0, 1), self._v_up.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _seen_by_chunk(self, chunk: Chunk, q: torch.Tensor) -> torch.Tensor:
        """[tokens of the chunk, heads * v]."""
        mla, num_heads = self._mla, q.shape[1]
        latent, key = self._latents.gather(self._layer, chunk).tensor_split([mla.kv_lora_rank], dim=1)
        k_nope = torch.matmul(latent, self._k_up.transpose(1, 2))
        k = torch.cat((k_nope, key.expand(num_heads, -1, -1)), dim=2)
        # Torch's fused kernel wants V as wide as K.
        v = functional.pad(torch.matmul(latent, self._v_up.transpose(1, 2)), (0, max(k.shape[2] - mla.v_head_dim, 0)))
        seen = _attended(chunk, q.transpose(0, 1), k, v, mla.score_scale)
        return seen[:, :, : mla.v_head_dim].transpose(0, 1).flatten(1)


class _QueryProjection:
    """From hidden states to the rank's queries, through a latent of their own or not."""

    def __init__(self, mla: Mla, tensors: Tensors, heads: slice) -> None:
        self._head_dim = mla.qk_head_dim
        rows = (_scaled(heads, mla.qk_head_dim),)
        self._down = None if mla.q_lora_rank is None else Linear((tensors["q_a"],), tensors.get("q_a_bias"))
        self._norm = tensors.get("q_a_norm")
        self._up = Linear.rows(tensors["q" if self._down is None else "q_b"], None, rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, nope + rope]."""
        if self._down is not None and self._norm is not None:
            x = rms_norm(self._down(x), self._norm, _EPSILON)
        return self._up(x).view(len(x), -1, self._head_dim)


def _scaled(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)


def _rotate(x: torch.Tensor, turn: torch.Tensor) -> None:
    """In place: dimension i with dimension i + half of the last axis. turn: cosines, then sines, of x's shape."""
    cosine, sine = turn.chunk(2, dim=-1)
    a, b = x.float().chunk(2, dim=-1)
    x.copy_(torch.cat((a * cosine - b * sine, b * cosine + a * sine), dim=-1))


def _attended(chunk: Chunk, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """[heads, tokens of the chunk, width]."""
    q, k, v = q[None], k[None], v[None]
    if not chunk.masks:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0]
    seen, first = [], 0
    for mask in chunk.masks:
        num_queries, end = mask.shape
        part = q[:, :, first : first + num_queries]
        seen.append(
            functional.scaled_dot_product_attention(part, k[:, :, :end], v[:, :, :end], attn_mask=mask, scale=scale)
        )
        first += num_queries
    return torch.cat(seen, dim=2)[0]
