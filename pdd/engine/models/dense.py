"""The blocks of a dense layer: grouped-query attention over K and V, and a gated MLP, or a rank's part of them."""

from __future__ import annotations

import torch

from pdd.engine.attention import BatchPlan, HeadNorm, PagedAttention, Queries
from pdd.engine.config import ModelConfig
from pdd.engine.models.decoder import Tensors
from pdd.engine.models.layers import Linear, gated_silu
from pdd.engine.parallel import Parallel
from pdd.engine.sharding import part_of, qkv_rows


class GroupedQueryAttention:
    """One layer's attention: the rank's query heads, and the KV heads that they see.

    `tensors`: of that layer, by the names of weights/tensors.py. `paged`: of the rank's heads.
    """

    def __init__(
        self, config: ModelConfig, layer: int, tensors: Tensors, paged: PagedAttention, parallel: Parallel
    ) -> None:
        rank, tp = parallel.tp_rank, parallel.tp
        self._layer = layer
        self._paged = paged
        self._qkv = Linear.rows(tensors["qkv"], tensors.get("qkv_bias"), qkv_rows(config, rank, tp))
        attended = part_of(rank, tp, config.num_heads * config.head_dim)
        self._output = Linear.columns(tensors["output"], tensors.get("output_bias"), attended)
        self._norm = (
            HeadNorm(tensors["q_norm"], tensors["k_norm"], config.rms_norm_eps) if "q_norm" in tensors else None
        )

    def store(self, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """q, k and v of all tokens, rotated: [tokens, (heads + 2 kv_heads) * head_dim]."""
        qkv = self._qkv(x)
        self._paged.store(self._layer, plan, qkv, self._norm)
        return qkv

    def attend(self, plan: BatchPlan, stored: torch.Tensor) -> torch.Tensor:
        return self._output(self._paged.attend(self._layer, plan, stored))

    def attend_queries(self, queries: Queries, stored: torch.Tensor) -> torch.Tensor:
        return self._output(self._paged.attend_queries(self._layer, queries, stored))


class DenseMlp:
    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self._gate_up = gate_up
        self._down = down

    @classmethod
    def of(cls, tensors: Tensors, prefix: str, parallel: Parallel) -> DenseMlp:
        """The rank's part of the intermediate features.

        `tensors`: `gate_up` [2 * intermediate, hidden], gate first, and `down` [hidden, intermediate], perhaps with
        biases, each name after `prefix`.
        """
        gate_up, down = tensors[f"{prefix}gate_up"], tensors[f"{prefix}down"]
        num_features = down.shape[1]
        part = part_of(parallel.tp_rank, parallel.tp, num_features)
        up = slice(num_features + part.start, num_features + part.stop)
        return cls(
            Linear.rows(gate_up, tensors.get(f"{prefix}gate_up_bias"), (part, up)),
            Linear.columns(down, tensors.get(f"{prefix}down_bias"), part),
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self._down(gated_silu(self._gate_up(x)))
