"""A GGUF file as a source: architectures llama, qwen2 and qwen3.

Two things differ from the Hugging Face form of the same model. In the llama architecture the rows of q and k are
permuted within each head, for a RoPE that turns neighbouring dimensions: undone here. And Llama 3's RoPE scaling is no
metadata but a tensor of divisors: the parameters are found again that give it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pdd.base.errors import ModelInvalid
from pdd.engine.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    NoScaling,
    Rope,
    RopeScaling,
    YarnScaling,
    yarn_attention_factor,
)
from pdd.engine.weights.gguf_file import GgufFile
from pdd.engine.weights.gguf_tokenizer import build_tokenizer, read_text
from pdd.engine.weights.source import Floats, RowOrder, Source, StoredTensor, bind
from pdd.engine.weights.tokenizer_checks import check_vocabulary

ARCHITECTURES = ("llama", "qwen2", "qwen3")
_NAMES = {
    "embed": "token_embd.weight",
    "attention_norm": "blk.{}.attn_norm.weight",
    "q": "blk.{}.attn_q.weight",
    "k": "blk.{}.attn_k.weight",
    "v": "blk.{}.attn_v.weight",
    "q_bias": "blk.{}.attn_q.bias",
    "k_bias": "blk.{}.attn_k.bias",
    "v_bias": "blk.{}.attn_v.bias",
    "q_norm": "blk.{}.attn_q_norm.weight",
    "k_norm": "blk.{}.attn_k_norm.weight",
    "output": "blk.{}.attn_output.weight",
    "output_bias": "blk.{}.attn_output.bias",
    "mlp_norm": "blk.{}.ffn_norm.weight",
    "gate": "blk.{}.ffn_gate.weight",
    "up": "blk.{}.ffn_up.weight",
    "gate_bias": "blk.{}.ffn_gate.bias",
    "up_bias": "blk.{}.ffn_up.bias",
    "down": "blk.{}.ffn_down.weight",
    "down_bias": "blk.{}.ffn_down.bias",
    "final_norm": "output_norm.weight",
    "head": "output.weight",
}
_ROPE_DIVISORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Source:
    """Raises ModelInvalid for a file that is damaged or of a kind that pdd does not run."""
    file = GgufFile(path)
    config = read_config(file)
    tokenizer = build_tokenizer(file)
    check_vocabulary(tokenizer, config, str(path))
    stored = {name: _stored(file, config, name) for name in file.tensors}
    pieces = bind(path, config, _NAMES, stored, frozenset({_ROPE_DIVISORS}))
    return Source(path, config, read_text(file, config), tokenizer.to_str().encode(), pieces)


def read_config(file: GgufFile) -> ModelConfig:
    """Raises ModelInvalid for a network that pdd does not run (naming the metadata's key)."""
    kind = file.value("general.architecture", str)
    _check(file, kind)
    hidden_size = file.value(f"{kind}.embedding_length", int)
    num_heads = file.value(f"{kind}.attention.head_count", int)
    head_dim = file.value(f"{kind}.attention.key_length", int, hidden_size // max(num_heads, 1))
    for key in ("attention.value_length", "rope.dimension_count"):
        if file.value(f"{kind}.{key}", int, head_dim) != head_dim:
            raise ModelInvalid(f"{file.path}: {kind}.{key} differs from the head size {head_dim}; pdd needs them equal")
    base = file.value(f"{kind}.rope.freq_base", float, 10000.0)
    try:
        return ModelConfig(
            architecture="llama",
            num_layers=file.value(f"{kind}.block_count", int),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=file.value(f"{kind}.attention.head_count_kv", int, num_heads),
            head_dim=head_dim,
            intermediate_size=file.value(f"{kind}.feed_forward_length", int),
            vocab_size=_num_rows(file, _NAMES["embed"]),
            max_position=file.value(f"{kind}.context_length", int),
            rms_norm_eps=file.value(f"{kind}.attention.layer_norm_rms_epsilon", float),
            rope=Rope(base=base, scaling=_scaling(file, kind, base, head_dim)),
            qkv_bias=_NAMES["q_bias"].format(0) in file.tensors,
            output_bias=_NAMES["output_bias"].format(0) in file.tensors,
            mlp_bias=_NAMES["gate_bias"].format(0) in file.tensors,
            qk_norm=_NAMES["q_norm"].format(0) in file.tensors,
            tied_embeddings=_NAMES["head"] not in file.tensors,
        )
    except ValueError as error:
        raise ModelInvalid(f"{file.path}: {error}") from error


def _check(file: GgufFile, kind: str) -> None:
    if kind not in ARCHITECTURES:
        raise ModelInvalid(f"{file.path}: architecture {kind!r}; pdd runs {', '.join(ARCHITECTURES)} from GGUF files")
    if file.value("split.count", int, 1) > 1:
        raise ModelInvalid(f"{file.path} is one part of several; join them first: llama-gguf-split --merge")
    if file.value(f"{kind}.expert_count", int, 0):
        raise ModelInvalid(f"{file.path}: {kind}.expert_count is set; pdd runs no mixture of experts from GGUF files")
    window = file.value(f"{kind}.attention.sliding_window", int, 0)
    if 0 < window < file.value(f"{kind}.context_length", int):
        raise ModelInvalid(
            f"{file.path}: {kind}.attention.sliding_window is {window}; pdd attends to all of the context"
        )


def _num_rows(file: GgufFile, name: str) -> int:
    if name not in file.tensors:
        raise ModelInvalid(f"{file.path}: tensor {name!r} is missing; fetch the file again")
    return file.tensors[name][0][0]


def _stored(file: GgufFile, config: ModelConfig, name: str) -> StoredTensor:
    """A tensor with the rows of q and k in the rotate-half order."""
    if file.value("general.architecture", str) == "llama":
        for suffix, num_heads in ((".attn_q.", config.num_heads), (".attn_k.", config.num_kv_heads)):
            if suffix in name and file.tensors[name][0][0] == num_heads * config.head_dim:
                return file.stored(name, _rotate_half_order(num_heads, config.head_dim))
    return file.stored(name)


def _rotate_half_order(num_heads: int, head_dim: int) -> RowOrder:
    """Where the rows of the rotate-half order lie in the interleaved one: of a head's rows 0 1 2 3 4 5 it picks
    0 2 4 1 3 5."""
    rows = np.arange(num_heads * head_dim, dtype=np.intp)
    return rows.reshape(num_heads, head_dim // 2, 2).swapaxes(1, 2).reshape(-1)


def _scaling(file: GgufFile, kind: str, base: float, head_dim: int) -> RopeScaling:
    scaling = file.value(f"{kind}.rope.scaling.type", str, "none")
    if _ROPE_DIVISORS in file.tensors:
        return _llama3_scaling(file, base, head_dim)
    factor = file.value(f"{kind}.rope.scaling.factor", float, 1.0)
    if scaling == "none":
        return NoScaling()
    if factor <= 0:
        raise ModelInvalid(f"{file.path}: {kind}.rope.scaling.factor is {factor}")
    if scaling == "linear":
        return LinearScaling(factor=factor)
    if scaling == "yarn":
        context = file.value(f"{kind}.context_length", int)
        attention_factor = file.value(f"{kind}.rope.scaling.yarn_attn_factor", float, 1.0)
        return YarnScaling(
            factor=factor,
            original_max_position=file.value(f"{kind}.rope.scaling.original_context_length", int, context),
            beta_fast=file.value(f"{kind}.rope.scaling.yarn_beta_fast", float, 32.0),
            beta_slow=file.value(f"{kind}.rope.scaling.yarn_beta_slow", float, 1.0),
            attention_factor=attention_factor * yarn_attention_factor(factor),
        )
    raise ModelInvalid(f"{file.path}: {kind}.rope.scaling.type is {scaling!r}; pdd runs none, linear and yarn")


def _llama3_scaling(file: GgufFile, base: float, head_dim: int) -> Llama3Scaling:
    """The parameters of Llama 3.1 (factor 8) and 3.2 (factor 32) differ in the factor only, which is the divisor of the
    longest wavelength. Raises ModelInvalid where that does not reproduce the other divisors."""
    stored = file.stored(_ROPE_DIVISORS)
    if stored.shape == (head_dim // 2,):
        divisors = stored.rows(0, head_dim // 2)
        scaling = Llama3Scaling(
            factor=float(divisors[-1]), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192
        )
        if scaling.factor >= 1 and np.allclose(divisors, _llama3_divisors(scaling, base, head_dim), rtol=1e-4):
            return scaling
    raise ModelInvalid(f"{stored.where} scales RoPE in a way that is not Llama 3's; use the Hugging Face files instead")


def _llama3_divisors(scaling: Llama3Scaling, base: float, head_dim: int) -> Floats:
    wavelengths = 2 * np.pi * base ** (np.arange(0, head_dim, 2) / head_dim)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    smooth = np.clip((scaling.original_max_position / wavelengths - low) / (high - low), 0.0, 1.0)
    return (1 / ((1 - smooth) / scaling.factor + smooth)).astype(np.float32)
