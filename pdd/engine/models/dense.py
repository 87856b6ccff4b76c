"""The blocks of a dense layer: grouped-query attention over K and V, and a gated MLP."""

from __future__ import annotations

import torch

from pdd.engine.attention import BatchPlan, HeadNorm, PagedAttention, Queries
from pdd.engine.models.decoder import Tensors
from pdd.engine.models.layers import gated_silu, linear


class GroupedQueryAttention:
    """One layer's attention. `tensors`: of that layer, by the names of weights/source.py."""

    def __init__(self, layer: int, tensors: Tensors, paged: PagedAttention, epsilon: float) -> None:
        self._layer = layer
        self._paged = paged
        self._qkv, self._qkv_bias = tensors["qkv"], tensors.get("qkv_bias")
        self._output, self._output_bias = tensors["output"], tensors.get("output_bias")
        self._norm = HeadNorm(tensors["q_norm"], tensors["k_norm"], epsilon) if "q_norm" in tensors else None

    def store(self, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """q, k and v of all tokens, rotated: [tokens, (heads + 2 kv_heads) * head_dim]."""
        qkv = linear(x, self._qkv, self._qkv_bias)
        self._paged.store(self._layer, plan, qkv, self._norm)
        return qkv

    def attend(self, plan: BatchPlan, stored: torch.Tensor) -> torch.Tensor:
        return linear(self._paged.attend(self._layer, plan, stored), self._output, self._output_bias)

    def attend_queries(self, queries: Queries, stored: torch.Tensor) -> torch.Tensor:
        return linear(self._paged.attend_queries(self._layer, queries, stored), self._output, self._output_bias)


class DenseMlp:
    """gate_up: [2 * intermediate, hidden], gate first; down: [hidden, intermediate]."""

    def __init__(
        self,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
    ) -> None:
        self._gate_up, self._gate_up_bias = gate_up, gate_up_bias
        self._down, self._down_bias = down, down_bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return linear(gated_silu(linear(x, self._gate_up, self._gate_up_bias)), self._down, self._down_bias)
