"""Hugging Face's `config.json` as a ModelConfig: what pdd runs is translated, everything else refused with its reason.

Field names and defaults are those of transformers' configuration classes for llama, mistral, qwen2 and qwen3, and for
what they have in common also of qwen3_moe and deepseek_v3 (the rest is in huggingface_moe.py).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from pdd.base.errors import ModelInvalid
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
    yarn_attention_factor,
)
from pdd.engine.weights.huggingface_moe import read_deepseek_moe, read_mla, read_qwen_moe
from pdd.engine.weights.json_file import read_json

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
}
TOY = "PddToyModel"


class _Quantization(msgspec.Struct):
    quant_method: str


class _Kind(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None


class _Toy(msgspec.Struct):
    num_hidden_layers: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    kv_lora_rank: int = 0
    """With it the cache is a latent one: one head of kv_lora_rank + 2 numbers, whatever the two fields above say."""
    toy_layer_seconds: float = 0.0


class _Rope(msgspec.Struct, forbid_unknown_fields=True):
    """`rope_parameters` (transformers 5) or `rope_scaling` (before). An unknown field would change the angles."""

    rope_type: str | None = None
    type: str | None = None
    rope_theta: float | None = None
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    partial_rotary_factor: float = 1.0
    finetuned: Any = None

    @property
    def kind(self) -> str:
        return self.rope_type or self.type or "default"


class _Network(msgspec.Struct):
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    rms_norm_eps: float = 1e-6
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    rope_theta: float = 10000.0
    rope_scaling: _Rope | None = None
    rope_parameters: _Rope | None = None
    original_max_position_embeddings: int | None = None
    partial_rotary_factor: float = 1.0
    sliding_window: int | None = None
    use_sliding_window: bool = False
    layer_types: list[str] | None = None
    quantization_config: msgspec.Raw = msgspec.Raw(b"null")


def read_config(path: Path) -> ModelConfig:
    """Raises ModelInvalid for a damaged file, and for a network that pdd does not run (naming the field)."""
    kind = read_json(path, _Kind)
    try:
        if TOY in (kind.architectures or []):
            return _toy(read_json(path, _Toy))
        _check_kind(path, kind)
        network = read_json(path, _Network)
        _check(path, network)
        return _translate(path, network)
    except ValueError as error:
        raise ModelInvalid(f"{path}: {error}") from error


def _toy(toy: _Toy) -> ModelConfig:
    mla = _toy_mla(toy.kv_lora_rank) if toy.kv_lora_rank else None
    return ModelConfig(
        architecture="toy",
        num_layers=toy.num_hidden_layers,
        hidden_size=toy.num_key_value_heads * toy.head_dim,
        num_heads=toy.num_key_value_heads,
        num_kv_heads=1 if mla else toy.num_key_value_heads,
        head_dim=mla.row_dim if mla else toy.head_dim,
        intermediate_size=0,
        vocab_size=toy.vocab_size,
        max_position=toy.max_position_embeddings,
        rms_norm_eps=0.0,
        rope=Rope(base=10000.0),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        tied_embeddings=True,
        mla=mla,
        toy_layer_seconds=toy.toy_layer_seconds,
    )


def _toy_mla(kv_lora_rank: int) -> Mla:
    """Of which only the width of a row means anything."""
    return Mla(
        q_lora_rank=None,
        kv_lora_rank=kv_lora_rank,
        qk_nope_head_dim=2,
        qk_rope_head_dim=2,
        v_head_dim=2,
        score_scale=1.0,
    )


def _translate(path: Path, network: _Network) -> ModelConfig:
    kind, heads = network.model_type, network.num_attention_heads
    if heads < 1:
        raise ModelInvalid(f"{path}: num_attention_heads is {heads}")
    rope = network.rope_parameters or network.rope_scaling or _Rope()
    scaling = _scaling(path, network, rope)
    moe, mla = _moe(path, network), None
    num_kv_heads = network.num_key_value_heads or heads
    head_dim = network.head_dim or (128 if kind == "qwen3" else network.hidden_size // heads)
    if kind == "deepseek_v3":
        mla = read_mla(path, getattr(scaling, "factor", 1.0), rope.mscale_all_dim or 0.0)
        num_kv_heads, head_dim = 1, mla.row_dim
    return ModelConfig(
        architecture="deepseek_v3" if mla else "qwen3_moe" if moe else "llama",
        num_layers=network.num_hidden_layers,
        hidden_size=network.hidden_size,
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=network.intermediate_size,
        vocab_size=network.vocab_size,
        max_position=_max_position(network, scaling, rope),
        rms_norm_eps=network.rms_norm_eps,
        rope=Rope(base=rope.rope_theta or network.rope_theta, scaling=scaling),
        qkv_bias=kind == "qwen2" or (kind != "mistral" and network.attention_bias),
        output_bias=kind not in ("mistral", "qwen2") and network.attention_bias,
        mlp_bias=kind == "llama" and network.mlp_bias,
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        tied_embeddings=network.tie_word_embeddings,
        moe=moe,
        mla=mla,
    )


def _moe(path: Path, network: _Network) -> Moe | None:
    match network.model_type:
        case "qwen3_moe":
            return read_qwen_moe(path, network.num_hidden_layers)
        case "deepseek_v3":
            return read_deepseek_moe(path, network.num_hidden_layers)
    return None


def _check_kind(path: Path, kind: _Kind) -> None:
    runs = f"pdd runs {', '.join(ARCHITECTURES)}"
    if kind.model_type not in ARCHITECTURES:
        raise ModelInvalid(f"{path}: model_type is {kind.model_type!r}; {runs}")
    if kind.architectures and ARCHITECTURES[kind.model_type] not in kind.architectures:
        raise ModelInvalid(f"{path}: architectures is {kind.architectures}, which is no text generator; {runs}")


def _check(path: Path, network: _Network) -> None:
    """Refuse what would compute something else than the model's authors meant."""
    if network.hidden_act != "silu":
        raise ModelInvalid(f"{path}: hidden_act is {network.hidden_act!r}; pdd computes silu only")
    if bytes(network.quantization_config) != b"null":
        raise ModelInvalid(
            f"{path}: quantization_config is set ({_quantization(network)}); pdd reads unquantised "
            f"safetensors, or GGUF files: use the model's bfloat16 files, or convert these to bfloat16"
        )
    window = network.sliding_window
    slides = network.model_type == "mistral" or network.use_sliding_window
    if slides and network.model_type != "llama" and window is not None and window < network.max_position_embeddings:
        raise ModelInvalid(f"{path}: sliding_window is {window}; pdd attends to the whole context only")
    other = sorted(set(network.layer_types or []) - {"full_attention"})
    if other:
        raise ModelInvalid(f"{path}: layer_types names {other[0]!r}; pdd runs full_attention only")
    rope = network.rope_parameters or network.rope_scaling or _Rope()
    if network.partial_rotary_factor != 1 or rope.partial_rotary_factor != 1:
        raise ModelInvalid(f"{path}: partial_rotary_factor is set; pdd turns whole heads only")


def _quantization(network: _Network) -> str:
    """Its method, for a message."""
    with suppress(msgspec.MsgspecError):
        return msgspec.json.decode(network.quantization_config, type=_Quantization).quant_method
    return "of an unknown kind"


def _scaling(path: Path, network: _Network, rope: _Rope) -> RopeScaling:
    original = rope.original_max_position_embeddings or network.original_max_position_embeddings
    match rope.kind:
        case "default":
            return NoScaling()
        case "linear":
            return LinearScaling(factor=_required(path, rope, "factor"))
        case "llama3":
            return Llama3Scaling(
                factor=_required(path, rope, "factor"),
                low_freq_factor=_required(path, rope, "low_freq_factor"),
                high_freq_factor=_required(path, rope, "high_freq_factor"),
                original_max_position=original or int(_required(path, rope, "original_max_position_embeddings")),
            )
        case "yarn":
            factor = rope.factor or (network.max_position_embeddings / original if original else 0.0)
            if factor <= 0:
                raise ModelInvalid(f"{path}: yarn RoPE scaling without a factor")
            return YarnScaling(
                factor=factor,
                original_max_position=original or network.max_position_embeddings,
                beta_fast=rope.beta_fast or 32.0,
                beta_slow=rope.beta_slow or 1.0,
                attention_factor=_attention_factor(rope, factor),
                truncate=rope.truncate,
            )
    raise ModelInvalid(f"{path}: RoPE of type {rope.kind!r}; pdd runs default, linear, llama3 and yarn")


def _attention_factor(rope: _Rope, factor: float) -> float:
    if rope.attention_factor:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return yarn_attention_factor(factor, rope.mscale) / yarn_attention_factor(factor, rope.mscale_all_dim)
    return yarn_attention_factor(factor)


def _max_position(network: _Network, scaling: RopeScaling, rope: _Rope) -> int:
    """YaRN is often switched on in a configuration whose max_position_embeddings is still the original one."""
    if isinstance(scaling, YarnScaling) and rope.original_max_position_embeddings:
        return max(network.max_position_embeddings, int(scaling.factor * scaling.original_max_position))
    return network.max_position_embeddings


def _required(path: Path, rope: _Rope, name: str) -> float:
    value = getattr(rope, name)
    if not value or not value > 0:
        raise ModelInvalid(f"{path}: RoPE of type {rope.kind!r} with {name} {value!r}, but it must be positive")
    return float(value)
