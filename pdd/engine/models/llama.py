"""Llama, Qwen2 and Qwen3: one decoder-only transformer, whose flags say which.

Runs in the executor, one `forward` a step, over any mixture of prefill chunks and decode tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch.nn.functional import embedding

from pdd.base.errors import ModelInvalid
from pdd.engine.attention import BatchPlan, HeadNorm, PagedAttention
from pdd.engine.config import ModelConfig
from pdd.engine.models.layers import gated_silu, linear, rms_norm
from pdd.engine.models.rope import rope_table
from pdd.engine.pack import PackedModel
from pdd.engine.protocol import Sampled
from pdd.engine.runner import BatchRow, LayerProgress, num_positions
from pdd.engine.sampler import sample
from pdd.memory.arena import Arena

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer of a pack; see engine/weights/source.py for the shapes."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    qkv_bias: torch.Tensor | None
    output_bias: torch.Tensor | None
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    head_norm: HeadNorm | None

    @classmethod
    def of(cls, tensors: Tensors, layer: int, epsilon: float) -> LayerWeights:
        prefix = f"layers.{layer}."
        own = {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
        return cls(
            attention_norm=own["attention_norm"],
            qkv=own["qkv"],
            output=own["output"],
            mlp_norm=own["mlp_norm"],
            gate_up=own["gate_up"],
            down=own["down"],
            qkv_bias=own.get("qkv_bias"),
            output_bias=own.get("output_bias"),
            gate_up_bias=own.get("gate_up_bias"),
            down_bias=own.get("down_bias"),
            head_norm=HeadNorm(own["q_norm"], own["k_norm"], epsilon) if "q_norm" in own else None,
        )


class LlamaModel:
    def __init__(
        self, config: ModelConfig, tensors: Tensors, arena: Arena, progress: LayerProgress, threads: int
    ) -> None:
        self._config = config
        self._progress = progress
        self._page_tokens = arena.layout.page_tokens
        self._embed = tensors["embed"]
        self._layers = [LayerWeights.of(tensors, layer, config.rms_norm_eps) for layer in range(config.num_layers)]
        self._final_norm = tensors["final_norm"]
        self._head = tensors["embed"] if config.tied_embeddings else tensors["head"]
        table = rope_table(config.rope, config.head_dim, num_positions(config, arena.layout))
        self._attention = PagedAttention(arena, self._embed.dtype, config.num_heads, table, threads)

    def forward(self, rows: list[BatchRow]) -> list[Sampled]:
        plan = BatchPlan(rows, self._page_tokens)
        logits = self.logits(plan)
        return sample(logits.numpy(), plan.sampled_rows) if plan.sampled_rows else []

    @torch.inference_mode()
    def logits(self, plan: BatchPlan) -> torch.Tensor:
        """float32 [rows that are sampled, vocabulary]. Stores the KV of all rows, telling each layer.

        Of the last layer only K and V are needed, except for the tokens that are sampled.
        """
        x = embedding(plan.tokens, self._embed)
        for index, layer in enumerate(self._layers[:-1]):
            qkv = self._store(index, layer, plan, x)
            x = self._mix(layer, x, self._attention.attend(index, plan, qkv))
        last, layer = len(self._layers) - 1, self._layers[-1]
        qkv = self._store(last, layer, plan, x)
        sampled = plan.sampled
        if not sampled.indices:
            return torch.empty(0, self._config.vocab_size)
        x = self._mix(layer, x[sampled.indices], self._attention.attend_queries(last, sampled, qkv[sampled.indices]))
        x = rms_norm(x, self._final_norm, self._config.rms_norm_eps)
        return linear(x, self._head, None).float()

    def _store(self, index: int, layer: LayerWeights, plan: BatchPlan, x: torch.Tensor) -> torch.Tensor:
        """The layer's q, k and v of all tokens, rotated; k and v are in the cache and the daemon knows."""
        qkv = linear(rms_norm(x, layer.attention_norm, self._config.rms_norm_eps), layer.qkv, layer.qkv_bias)
        self._attention.store(index, plan, qkv, layer.head_norm)
        self._progress.layer_stored()
        return qkv

    def _mix(self, layer: LayerWeights, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The rest of a layer after attention: projection, MLP, and both residuals."""
        x = x + linear(attended, layer.output, layer.output_bias)
        hidden = linear(rms_norm(x, layer.mlp_norm, self._config.rms_norm_eps), layer.gate_up, layer.gate_up_bias)
        return x.add_(linear(gated_silu(hidden), layer.down, layer.down_bias))


def load_llama(packed: PackedModel, arena: Arena, progress: LayerProgress, threads: int) -> LlamaModel:
    """Raises ModelInvalid where the weights cannot be mapped."""
    torch.set_num_threads(threads)
    return LlamaModel(packed.config, load_tensors(packed.weights), arena, progress, threads)


def load_tensors(path: Path) -> Tensors:
    """Views of the file's mapping, never copies: executors of one node share the weights through the page cache."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelInvalid(f"{path}: {error}; pack the model again") from error
