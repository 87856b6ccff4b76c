"""The numbers that only mixtures of experts and latent attention have, from Hugging Face's `config.json`.

Field names and defaults are those of transformers' configuration classes for qwen3_moe and deepseek_v3; the fields that
transformers ignores (`scoring_func` and below) are those of the published DeepSeek-V3.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from pdd.base.errors import ModelInvalid
from pdd.engine.config import MAX_LAYERS, Mla, Moe, yarn_attention_factor
from pdd.engine.weights.json_file import read_json


class _Qwen(msgspec.Struct):
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_experts: int | None = None
    num_local_experts: int | None = None
    """What transformers 5 writes in place of num_experts."""
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: list[int] | None = None


class _DeepSeek(msgspec.Struct):
    num_experts_per_tok: int
    moe_intermediate_size: int
    n_routed_experts: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = 1536
    n_shared_experts: int | None = 1
    routed_scaling_factor: float = 2.5
    n_group: int | None = 8
    topk_group: int | None = 4
    first_k_dense_replace: int | None = 3
    norm_topk_prob: bool | None = True
    rope_interleave: bool | None = True
    scoring_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    moe_layer_freq: int = 1
    num_nextn_predict_layers: int = 0


def read_qwen_moe(path: Path, num_layers: int) -> Moe:
    """Raises ModelInvalid for fields that are missing or damaged, ValueError for numbers that make no router."""
    qwen = read_json(path, _Qwen)
    num_experts = qwen.num_local_experts or qwen.num_experts
    if not num_experts or qwen.decoder_sparse_step < 1:
        raise ModelInvalid(
            f"{path}: num_experts is {num_experts} and decoder_sparse_step {qwen.decoder_sparse_step}; both must be "
            f"positive"
        )
    num_layers = min(num_layers, MAX_LAYERS)
    every_nth = set(range(qwen.decoder_sparse_step - 1, num_layers, qwen.decoder_sparse_step))
    sparse = every_nth - set(qwen.mlp_only_layers or [])
    return Moe(
        num_experts=num_experts,
        num_experts_per_token=qwen.num_experts_per_tok,
        expert_intermediate_size=qwen.moe_intermediate_size,
        scoring="softmax",
        norm_topk=qwen.norm_topk_prob,
        dense_layers=tuple(layer for layer in range(num_layers) if layer not in sparse),
    )


def read_deepseek_moe(path: Path, num_layers: int) -> Moe:
    """Raises like `read_qwen_moe`, and ModelInvalid for the routers of DeepSeek's other models."""
    deepseek = read_json(path, _DeepSeek)
    other = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1}
    for name, value in other.items():
        if getattr(deepseek, name) != value:
            raise ModelInvalid(f"{path}: {name} is {getattr(deepseek, name)!r}; of deepseek_v3 pdd runs {value!r} only")
    return Moe(
        num_experts=deepseek.n_routed_experts,
        num_experts_per_token=deepseek.num_experts_per_tok,
        expert_intermediate_size=deepseek.moe_intermediate_size,
        num_shared_experts=deepseek.n_shared_experts or 0,
        scoring="sigmoid",
        norm_topk=bool(deepseek.norm_topk_prob),
        num_groups=deepseek.n_group or 1,
        top_groups=deepseek.topk_group or 1,
        routed_scaling=deepseek.routed_scaling_factor,
        dense_layers=tuple(range(min(deepseek.first_k_dense_replace or 0, num_layers, MAX_LAYERS))),
    )


def read_mla(path: Path, stretch: float, mscale: float) -> Mla:
    """`stretch`: by what factor RoPE is scaled, 1 where it is not. `mscale`: its `mscale_all_dim`, 0 where absent.
    Raises like `read_qwen_moe`."""
    deepseek = read_json(path, _DeepSeek)
    qk_head_dim = deepseek.qk_nope_head_dim + deepseek.qk_rope_head_dim
    return Mla(
        q_lora_rank=deepseek.q_lora_rank,
        kv_lora_rank=deepseek.kv_lora_rank,
        qk_nope_head_dim=deepseek.qk_nope_head_dim,
        qk_rope_head_dim=deepseek.qk_rope_head_dim,
        v_head_dim=deepseek.v_head_dim,
        score_scale=yarn_attention_factor(stretch, mscale) ** 2 / math.sqrt(max(qk_head_dim, 1)),
    )


def interleaves_rope(path: Path) -> bool:
    """Whether RoPE turns rows 2i and 2i + 1 of a head's rotated part together, rather than rows i and i + half."""
    return bool(read_json(path, _DeepSeek).rope_interleave)


def num_further_layers(path: Path) -> int:
    """Layers after the network's own that predict further tokens (arXiv:2412.19437, section 2.2)."""
    return read_json(path, _DeepSeek).num_nextn_predict_layers
