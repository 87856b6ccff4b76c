"""What a packed model is: `config.json` (the network's numbers) and `text.json` (how text becomes tokens and back).

Written once by pack.py, read by the daemon (to size the KV cache and to serve HTTP) and by every executor (to build the
network), so nothing here needs torch.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec

Dtype = Literal["float32", "bfloat16"]
"""What a pack stores its weights in, and what an executor computes in."""


class NoScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="none"):
    """Plain RoPE: frequency i of `head_dim / 2` is `base ** (-2 i / head_dim)`."""


class LinearScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """Every frequency is divided by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


class Llama3Scaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="llama3"):
    """Long wavelengths are divided by `factor`, short ones kept, with a smooth ramp between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


class YarnScaling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="yarn"):
    """Interpolation by parts (YaRN, arXiv:2309.00071); cos and sin are multiplied by `attention_factor`."""

    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    """Already worked out: where the source gives none it is `yarn_attention_factor(factor)`."""
    truncate: bool = True
    """Whether the ramp's two bounds are rounded outwards to whole dimensions."""


MAX_LAYERS = 10_000


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The paper's sqrt(1/t) (section 3.4); `mscale` is DeepSeek's weight of it."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


RopeScaling = NoScaling | LinearScaling | Llama3Scaling | YarnScaling


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding in the rotate-half convention: dimension i turns with dimension `i + head_dim / 2`."""

    base: float
    scaling: RopeScaling = NoScaling()


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with RMS norm, RoPE, grouped-query attention and a SiLU-gated MLP.

    llama, mistral, qwen2 and qwen3 differ only in the flags below. The "toy" has no weights: of it only the KV layout's
    numbers, `vocab_size` and `max_position` mean anything. Raises ValueError for numbers that make no network.
    """

    architecture: Literal["llama", "toy"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """Longest sequence in tokens, prompt and answer together."""
    rms_norm_eps: float
    rope: Rope
    qkv_bias: bool
    output_bias: bool
    """On attention's output projection."""
    mlp_bias: bool
    qk_norm: bool
    """RMS norm of each head's q and k (over head_dim) before RoPE."""
    tied_embeddings: bool
    """The head is the embedding's transpose, and the pack holds no `head`."""
    toy_layer_seconds: float = 0.0

    def __post_init__(self) -> None:
        names = ["num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position"]
        if self.architecture == "llama":
            names += ["hidden_size", "intermediate_size"]
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} attention heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}, but RoPE turns pairs of dimensions")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers is {self.num_layers}; pdd takes more than {MAX_LAYERS} for damage")
        for name, value in {"base": self.rope.base, **msgspec.structs.asdict(self.rope.scaling)}.items():
            if not (value > 0 and math.isfinite(value)) and name != "truncate":
                raise ValueError(f"RoPE's {name} is {value}, but must be positive")
        for name, value in {"rms_norm_eps": self.rms_norm_eps, "toy_layer_seconds": self.toy_layer_seconds}.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}, but must not be negative")


class TextConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How requests' text meets the model: special tokens, chat template, and the model's own sampling defaults."""

    kind: Literal["tokenizer", "toy"]
    """"tokenizer": tokenizer.json lies beside. "toy": no tokenizer.json; a token is a byte of UTF-8."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    """Sampling any of these ends the answer."""
    add_bos: bool = False
    """Whether a plain prompt starts with `bos_token_id` (a chat template writes its own)."""
    bos_token: str | None = None
    eos_token: str | None = None
    chat_template: str | None = None
    """Jinja source; None where the model has none, and then chat requests are refused."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
