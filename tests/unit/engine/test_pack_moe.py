"""Packs of mixtures of experts and of latent attention: the checkpoint's numbers at the places that tensors.py says."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import edit_json, write_huggingface, write_json

from pdd.base.errors import ModelInvalid
from pdd.engine.pack import pack
from pdd.engine.weights.huggingface_config import read_config

State = dict[str, torch.Tensor]


def rotate_half_order(rows: torch.Tensor, num_heads: int, num_plain: int) -> torch.Tensor:
    """Heads of plain rows and then interleaved pairs: first members of the pairs, then the second ones."""
    heads = rows.view(num_heads, -1, *rows.shape[1:])
    rotated = heads[:, num_plain:]
    return torch.cat((heads[:, :num_plain], rotated[:, 0::2], rotated[:, 1::2]), dim=1).reshape(rows.shape)


def expected_experts(state: State, layer: int, num_experts: int) -> State:
    """From per-expert tensors or from transformers' own fused ones."""
    prefix = f"model.layers.{layer}.mlp"
    experts = f"{prefix}.experts"
    if f"{experts}.gate_up_proj" in state:
        gate_up, down = state[f"{experts}.gate_up_proj"], state[f"{experts}.down_proj"]
    else:
        each = [
            {part: state[f"{experts}.{index}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for index in range(num_experts)
        ]
        gate_up = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        down = torch.stack([one["down"] for one in each])
    tensors = {"router": state[f"{prefix}.gate.weight"], "experts_gate_up": gate_up, "experts_down": down}
    if f"{prefix}.shared_experts.down_proj.weight" in state:
        shared = {part: state[f"{prefix}.shared_experts.{part}_proj.weight"] for part in ("gate", "up", "down")}
        tensors["router_bias"] = state[f"{prefix}.gate.e_score_correction_bias"]
        tensors["shared_gate_up"], tensors["shared_down"] = torch.cat((shared["gate"], shared["up"])), shared["down"]
    return {f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def expected_latents(state: State, layer: int, config: Any) -> State:
    prefix = f"model.layers.{layer}.self_attn"
    heads, nope = config.num_attention_heads, config.qk_nope_head_dim
    order = rotate_half_order if config.rope_interleave else lambda rows, *_: rows
    if config.q_lora_rank is None:
        tensors = {"q": order(state[f"{prefix}.q_proj.weight"], heads, nope)}
    else:
        tensors = {
            "q_a": state[f"{prefix}.q_a_proj.weight"],
            "q_a_norm": state[f"{prefix}.q_a_layernorm.weight"],
            "q_b": order(state[f"{prefix}.q_b_proj.weight"], heads, nope),
        }
    tensors["kv_a"] = order(state[f"{prefix}.kv_a_proj_with_mqa.weight"], 1, config.kv_lora_rank)
    tensors["kv_a_norm"] = state[f"{prefix}.kv_a_layernorm.weight"]
    up = state[f"{prefix}.kv_b_proj.weight"].view(heads, nope + config.v_head_dim, -1)
    tensors["k_up"], tensors["v_up"] = up[:, :nope], up[:, nope:]
    tensors["output"] = state[f"{prefix}.o_proj.weight"]
    if config.attention_bias:
        if config.q_lora_rank is not None:
            tensors["q_a_bias"] = state[f"{prefix}.q_a_proj.bias"]
        tensors["kv_a_bias"] = order(state[f"{prefix}.kv_a_proj_with_mqa.bias"], 1, config.kv_lora_rank)
        tensors["output_bias"] = state[f"{prefix}.o_proj.bias"]
    return {f"layers.{layer}.{name}": tensor for name, tensor in tensors.items()}


def check(packed: State, expected: State, dtype: torch.dtype) -> None:
    for name, tensor in expected.items():
        kind = torch.float32 if ".router" in name else dtype
        assert packed[name].dtype == kind, name
        assert torch.equal(packed[name], tensor.to(kind)), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("options", "sparse"),
    [({}, [0, 1, 2]), ({"mlp_only_layers": [0], "norm_topk_prob": True}, [1, 2]), ({"decoder_sparse_step": 2}, [1])],
)
def test_qwen3_moe(tmp_path: Path, options: dict[str, Any], sparse: list[int], dtype: str) -> None:
    model = write_huggingface(tmp_path / "model", "qwen3_moe", num_hidden_layers=3, **options)
    packed = pack(tmp_path / "model", dtype, tmp_path / "cache")
    tensors, state = load_file(packed.weights), model.state_dict()
    assert [layer for layer in range(3) if packed.config.is_sparse(layer)] == sparse
    for layer in range(3):
        assert (f"layers.{layer}.router" in tensors) == (layer in sparse)
        assert (f"layers.{layer}.gate_up" in tensors) == (layer not in sparse)
        if layer in sparse:
            check(tensors, expected_experts(state, layer, 8), getattr(torch, dtype))
    assert (packed.config.qk_norm, packed.config.num_planes, packed.config.head_dim) == (True, 2, 16)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [{}, {"q_lora_rank": None}, {"rope_interleave": False}, {"attention_bias": True}, {"first_k_dense_replace": 0}],
)
def test_deepseek_v3(tmp_path: Path, options: dict[str, Any], dtype: str) -> None:
    model = write_huggingface(tmp_path / "model", "deepseek_v3", **options)
    packed = pack(tmp_path / "model", dtype, tmp_path / "cache")
    tensors, state = load_file(packed.weights), model.state_dict()
    expected = {}
    for layer in range(2):
        expected |= expected_latents(state, layer, model.config)
        if layer >= model.config.first_k_dense_replace:
            expected |= expected_experts(state, layer, 8)
    check(tensors, expected, getattr(torch, dtype))
    dense = [name for name in tensors if name.endswith(".gate_up")]
    assert len(dense) == model.config.first_k_dense_replace
    config = packed.config
    assert (config.num_planes, config.num_kv_heads, config.head_dim, config.num_heads) == (1, 1, 32, 4)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fused_experts_are_taken_apart(tmp_path: Path, family: str) -> None:
    """As transformers holds them in memory, and some checkpoints on disk."""
    model = write_huggingface(tmp_path / "model", family)
    separate = pack(tmp_path / "model", "float32", tmp_path / "cache")
    fused = Path(shutil.copytree(tmp_path / "model", tmp_path / "fused"))
    state = model.state_dict()
    assert any(name.endswith("experts.gate_up_proj") for name in state)
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, fused / "model.safetensors")
    packed = pack(fused, "float32", tmp_path / "cache")
    assert packed.digest != separate.digest
    assert packed.weights.read_bytes() == separate.weights.read_bytes()
    edit_json(fused / "config.json", moe_intermediate_size=10)
    with pytest.raises(ModelInvalid, match=r"experts.down_proj.*has shape \[8, 32, 20\].*\[8, 32, 10\]"):
        pack(fused, "float32", tmp_path / "cache")


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_huggingface(tmp_path / "model", "deepseek_v3")
    plain = pack(tmp_path / "model", "float32", tmp_path / "cache")
    assert not caplog.messages
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    tensors |= {"model.layers.2.eh_proj.weight": torch.ones(3, 5), "model.layers.2.enorm.weight": torch.ones(3)}
    save_file(tensors, tmp_path / "model" / "model.safetensors")
    packed = pack(tmp_path / "model", "float32", tmp_path / "cache")
    assert packed.weights.read_bytes() == plain.weights.read_bytes()
    assert "layers from 2 on" in caplog.messages[0]
    edit_json(tmp_path / "model" / "config.json", num_nextn_predict_layers=0)
    with pytest.raises(ModelInvalid, match=r"no place in this kind of model, for example 'model\.layers\.2"):
        pack(tmp_path / "model", "float32", tmp_path / "cache")


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("qwen3_moe", {"num_local_experts": 9}, r"gate.weight' has shape \[8, 32\].*\[9, 32\]"),
        ("qwen3_moe", {"num_local_experts": 7}, r"has shape \[8, 32\]"),
        ("qwen3_moe", {"num_local_experts": None}, "num_experts is None"),
        ("qwen3_moe", {"decoder_sparse_step": 0}, "decoder_sparse_step 0"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "9 experts per token, but only 8"),
        ("qwen3_moe", {"num_hidden_layers": 10**12}, "for damage"),
        ("qwen3_moe", {"num_local_experts": 10**12}, "for damage"),
        ("qwen3_moe", {"moe_intermediate_size": 0}, "expert_intermediate_size is 0"),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, "sliding_window is 64"),
        ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, r"quantization_config is set \(fp8\)"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"n_group": 3}, "do not make 3 groups"),
        ("deepseek_v3", {"n_group": 8}, "do not make 8 groups of two"),
        ("deepseek_v3", {"topk_group": 5}, "top_groups is 5"),
        ("deepseek_v3", {"topk_group": 1}, "3 experts per token, but only 2"),
        ("deepseek_v3", {"kv_lora_rank": 23}, r"kv_b_proj.*has shape \[88, 24\].*\[88, 23\]"),
        ("deepseek_v3", {"num_attention_heads": 10**12}, "has shape"),
        ("deepseek_v3", {"qk_rope_head_dim": 7}, "pairs of dimensions"),
        ("deepseek_v3", {"v_head_dim": 0}, "v_head_dim is 0"),
        ("deepseek_v3", {"q_lora_rank": 0}, "q_lora_rank is 0"),
        ("deepseek_v3", {"routed_scaling_factor": 0}, "routed_scaling is 0"),
        ("deepseek_v3", {"kv_lora_rank": None}, "kv_lora_rank"),
    ],
)
def test_what_makes_no_network_is_refused(tmp_path: Path, family: str, changes: dict[str, Any], words: str) -> None:
    write_huggingface(tmp_path / "model", family)
    edit_json(tmp_path / "model" / "config.json", **changes)
    with pytest.raises(ModelInvalid, match=words) as caught:
        pack(tmp_path / "model", "float32", tmp_path / "cache")
    assert str(tmp_path / "model") in str(caught.value)


def test_a_toy_with_a_latent_cache(tmp_path: Path) -> None:
    toy = {
        "architectures": ["PddToyModel"], "num_hidden_layers": 4, "num_key_value_heads": 6, "head_dim": 8,
        "vocab_size": 300, "max_position_embeddings": 1000, "kv_lora_rank": 30,
    }  # fmt: skip
    (tmp_path / "toy").mkdir()
    write_json(tmp_path / "toy" / "config.json", toy)
    config = pack(tmp_path / "toy", "float32", tmp_path / "cache").config
    assert (config.num_planes, config.num_kv_heads, config.head_dim, config.num_heads) == (1, 1, 32, 6)


def test_the_published_configurations(tmp_path: Path) -> None:
    """What stands in config.json of DeepSeek-R1 (without its quantisation) and Qwen3-Coder-480B-A35B."""
    path = tmp_path / "config.json"
    deepseek = {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_act": "silu",
        "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61, "num_attention_heads": 128,
        "num_key_value_heads": 128, "vocab_size": 129280, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "rope_theta": 10000, "attention_bias": False, "tie_word_embeddings": False, "ep_size": 1,
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "first_k_dense_replace": 3, "moe_layer_freq": 1, "num_nextn_predict_layers": 1,
    }  # fmt: skip
    path.write_text(json.dumps(deepseek))
    config = read_config(path)
    assert config.mla is not None
    assert (config.head_dim, config.num_kv_heads, config.num_planes, config.max_position) == (576, 1, 1, 163840)
    assert config.mla.score_scale == pytest.approx(192**-0.5 * 1.3688879**2)
    assert [layer for layer in range(61) if not config.is_sparse(layer)] == [0, 1, 2]
    qwen = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_act": "silu", "head_dim": 128,
        "hidden_size": 6144, "intermediate_size": 8192, "num_hidden_layers": 62, "num_attention_heads": 96,
        "num_key_value_heads": 8, "vocab_size": 151936, "max_position_embeddings": 262144, "rms_norm_eps": 1e-6,
        "rope_theta": 10000000, "rope_scaling": None, "tie_word_embeddings": False, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "moe_intermediate_size": 2560, "norm_topk_prob": True, "num_experts": 160,
        "num_experts_per_tok": 8, "use_sliding_window": False, "sliding_window": None, "use_qk_norm": True,
    }  # fmt: skip
    path.write_text(json.dumps(qwen))
    config = read_config(path)
    assert config.moe is not None
    assert (config.head_dim, config.num_kv_heads, config.moe.num_experts, config.moe.dense_layers) == (128, 8, 160, ())
