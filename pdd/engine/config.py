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
MAX_EXPERTS = 1_000_000
"""Of all layers together."""


def yarn_attention_factor(factor: float, mscale: float = 1.0) -> float:
    """The paper's sqrt(1/t) (section 3.4); `mscale` is DeepSeek's weight of it."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


RopeScaling = NoScaling | LinearScaling | Llama3Scaling | YarnScaling


class Rope(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding in the rotate-half convention: dimension i turns with dimension `i + head_dim / 2`."""

    base: float
    scaling: RopeScaling = NoScaling()


class Moe(msgspec.Struct, frozen=True, kw_only=True):
    """Mixture of experts in place of the MLP: a router sends each token to a few of many small MLPs.

    Raises ValueError for numbers that make no router.
    """

    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    num_shared_experts: int = 0
    """Every token also goes through an MLP that is so many experts wide."""
    scoring: Literal["softmax", "sigmoid"]
    """softmax: over all experts. sigmoid: each expert for itself, and a learned bias per expert helps to choose, but
    not to weigh (arXiv:2408.15664)."""
    norm_topk: bool
    """Whether the weights of the chosen experts are divided by their sum."""
    num_groups: int = 1
    """Experts are in so many equal groups; only those of the best `top_groups` can be chosen. A group is as good as
    its two best experts together (arXiv:2412.19437, section 2.1.2)."""
    top_groups: int = 1
    routed_scaling: float = 1.0
    """What the routed experts' sum is multiplied with."""
    dense_layers: tuple[int, ...] = ()
    """Layers that have an ordinary MLP all the same."""

    def __post_init__(self) -> None:
        for name in ("num_experts", "num_experts_per_token", "expert_intermediate_size", "num_groups", "top_groups"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.num_shared_experts < 0:
            raise ValueError(f"num_shared_experts is {self.num_shared_experts}, but must not be negative")
        if not (self.routed_scaling > 0 and math.isfinite(self.routed_scaling)):
            raise ValueError(f"routed_scaling is {self.routed_scaling}, but must be positive")
        if self.num_experts % self.num_groups or (self.num_groups > 1 and self.num_experts < 2 * self.num_groups):
            raise ValueError(f"{self.num_experts} experts do not make {self.num_groups} groups of two or more")
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups is {self.top_groups}, but there are only {self.num_groups} groups")
        eligible = self.num_experts // self.num_groups * self.top_groups
        if self.num_experts_per_token > eligible:
            raise ValueError(f"{self.num_experts_per_token} experts per token, but only {eligible} can be chosen")


class Mla(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (arXiv:2405.04434, section 2.1): the cache holds one row per token,

        | latent, normed: kv_lora_rank | rotated key part that all heads share: qk_rope_head_dim |

    from which every head's K and V can be made. To the cache this is one KV head with one plane; a head's score is
    the product of its query, taken through `k_up`, with that row. Raises ValueError for numbers that make no heads.
    """

    q_lora_rank: int | None
    """Width of the latent that queries are made of; None: they are made of the hidden state."""
    kv_lora_rank: int
    qk_nope_head_dim: int
    """Of a head's q and k: the dimensions that RoPE leaves alone, which come first."""
    qk_rope_head_dim: int
    v_head_dim: int
    score_scale: float
    """What q . k is multiplied with: 1 / sqrt(nope + rope), times YaRN's factor where the context is stretched."""

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def row_dim(self) -> int:
        """Numbers that a token takes in the cache."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        if self.q_lora_rank is not None and self.q_lora_rank < 1:
            raise ValueError(f"q_lora_rank is {self.q_lora_rank}, but must be at least 1, or absent")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}, but RoPE turns pairs of dimensions")
        if not (self.score_scale > 0 and math.isfinite(self.score_scale)):
            raise ValueError(f"score_scale is {self.score_scale}, but must be positive")


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder-only transformer with RMS norm, RoPE, grouped-query or latent attention, and SiLU-gated MLPs.

    llama, mistral, qwen2 and qwen3 differ only in the flags below; qwen3_moe has `moe`; deepseek_v3 has `mla` and
    `moe`. The "toy" has no weights: of it only the KV layout's numbers (with `mla`: of a latent cache), `vocab_size`
    and `max_position` mean anything.
    Raises ValueError for numbers that make no network.
    """

    architecture: Literal["llama", "qwen3_moe", "deepseek_v3", "toy"]
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    """Of the cache: 1 with `mla`."""
    head_dim: int
    """Of the cache: `mla.row_dim` with `mla`."""
    intermediate_size: int
    """Of the layers that are not sparse."""
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
    moe: Moe | None = None
    mla: Mla | None = None
    toy_layer_seconds: float = 0.0

    @property
    def num_planes(self) -> int:
        """Of the cache: K and V, or the latent alone."""
        return 1 if self.mla else 2

    @property
    def shared_intermediate_size(self) -> int:
        """Of the MLP that every token of a sparse layer goes through; 0 where there is none."""
        return self.moe.num_shared_experts * self.moe.expert_intermediate_size if self.moe else 0

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def __post_init__(self) -> None:
        names = ["num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "max_position"]
        if self.architecture != "toy":
            names += ["hidden_size", "intermediate_size"]
        for name in names:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 1")
        self._check_parts()
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} attention heads do not divide among {self.num_kv_heads} KV heads")
        if self.head_dim % 2 and not self.mla:
            raise ValueError(f"head_dim is {self.head_dim}, but RoPE turns pairs of dimensions")
        if self.num_layers > MAX_LAYERS:
            raise ValueError(f"num_layers is {self.num_layers}; pdd takes more than {MAX_LAYERS} for damage")
        for name, value in {"base": self.rope.base, **msgspec.structs.asdict(self.rope.scaling)}.items():
            if not (value > 0 and math.isfinite(value)) and name != "truncate":
                raise ValueError(f"RoPE's {name} is {value}, but must be positive")
        for name, value in {"rms_norm_eps": self.rms_norm_eps, "toy_layer_seconds": self.toy_layer_seconds}.items():
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} is {value}, but must not be negative")

    def _check_parts(self) -> None:
        parts = {
            "llama": (False, False),
            "qwen3_moe": (True, False),
            "deepseek_v3": (True, True),
            "toy": (False, self.mla is not None),
        }
        if (self.moe is not None, self.mla is not None) != parts[self.architecture]:
            raise ValueError(f"architecture {self.architecture!r} has other parts (moe, mla) than are given")
        if self.mla and (self.num_kv_heads, self.head_dim) != (1, self.mla.row_dim):
            raise ValueError(
                f"a latent cache has 1 head of {self.mla.row_dim}, not {self.num_kv_heads} of {self.head_dim}"
            )
        if self.moe and self.num_layers * self.moe.num_experts > MAX_EXPERTS:
            raise ValueError(
                f"{self.moe.num_experts} experts a layer; pdd takes more than {MAX_EXPERTS} in all for damage"
            )


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
