from __future__ import annotations

import subprocess
import sys
from typing import Any

import msgspec
import pytest

from pdd.engine.config import (
    LinearScaling,
    Llama3Scaling,
    Mla,
    ModelConfig,
    Moe,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
)

NUMBERS: dict[str, Any] = {
    "architecture": "llama",
    "num_layers": 2,
    "hidden_size": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 300,
    "max_position": 128,
    "rms_norm_eps": 1e-6,
    "rope": Rope(base=10000.0),
    "qkv_bias": False,
    "output_bias": False,
    "mlp_bias": False,
    "qk_norm": False,
    "tied_embeddings": True,
}


MOE: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_token": 2,
    "expert_intermediate_size": 20,
    "num_shared_experts": 3,
    "scoring": "sigmoid",
    "norm_topk": True,
    "num_groups": 4,
    "top_groups": 2,
    "routed_scaling": 2.5,
    "dense_layers": (0,),
}
MLA = Mla(
    q_lora_rank=None, kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, score_scale=0.2
)  # fmt: skip
LATENT: dict[str, Any] = NUMBERS | {
    "architecture": "deepseek_v3",
    "num_kv_heads": 1,
    "head_dim": 32,
    "moe": Moe(**MOE),
    "mla": MLA,
}


@pytest.mark.parametrize(
    "scaling",
    [
        NoScaling(),
        LinearScaling(factor=2.0),
        Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
        YarnScaling(factor=4.0, original_max_position=64, beta_fast=32.0, beta_slow=1.0, attention_factor=1.1),
    ],
)
def test_a_config_survives_its_file(scaling: RopeScaling) -> None:
    config = ModelConfig(**NUMBERS | {"rope": Rope(base=5e5, scaling=scaling)})
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config


def test_a_sparse_latent_config_survives_its_file() -> None:
    config = ModelConfig(**LATENT)
    assert msgspec.json.decode(msgspec.json.encode(config), type=ModelConfig) == config
    assert (config.num_planes, config.shared_intermediate_size) == (1, 60)
    assert [config.is_sparse(layer) for layer in range(2)] == [False, True]
    dense = ModelConfig(**NUMBERS)
    assert (dense.num_planes, dense.shared_intermediate_size, dense.is_sparse(0)) == (2, 0, False)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"moe": None}, "other parts"),
        ({"mla": None}, "other parts"),
        ({"architecture": "llama"}, "other parts"),
        ({"num_kv_heads": 2}, "1 head of 32, not 2 of 32"),
        ({"head_dim": 24}, "1 head of 32, not 1 of 24"),
        ({"moe": Moe(**MOE | {"num_experts": 4_000_000})}, "for damage"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**LATENT | change)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"num_kv_heads": 3}, "do not divide"),
        ({"head_dim": 7}, "pairs of dimensions"),
        ({"rope": Rope(base=0.0)}, "RoPE's base"),
        ({"rope": Rope(base=float("inf"))}, "RoPE's base"),
        ({"rope": Rope(base=1.0, scaling=LinearScaling(factor=float("nan")))}, "RoPE's factor"),
        ({"num_layers": 10**9}, "damage"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps"),
        ({"intermediate_size": 0}, "intermediate_size"),
        ({"toy_layer_seconds": float("nan")}, "toy_layer_seconds"),
    ],
)
def test_numbers_that_make_no_network_are_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ModelConfig(**NUMBERS | change)


def test_a_damaged_file_is_refused_like_wrong_numbers() -> None:
    text = msgspec.json.encode(ModelConfig(**NUMBERS)).replace(b'"num_kv_heads":2', b'"num_kv_heads":3')
    with pytest.raises(msgspec.ValidationError, match="do not divide"):
        msgspec.json.decode(text, type=ModelConfig)


def test_packing_needs_no_torch() -> None:
    code = "import sys, pdd.engine.pack; sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
