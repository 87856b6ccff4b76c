"""Which tensors a pack is made of, in the order of its file, and of which pieces each is put together.

A packed tensor is one or more pieces, one after the other: `layers.0.qkv` is made of the pieces `layers.0.q`,
`layers.0.k` and `layers.0.v`. In a piece's name numbers come before the last word: the layer, and the expert if it has
one (`layers.3.17.expert_gate`).

    attention      qkv  [(heads + 2 kv_heads) * head_dim, hidden]          output  [hidden, heads * head_dim]
    or latent      q_a  [q_lora, hidden]    q_b  [heads * (nope + rope), q_lora]    (or q, from hidden, without q_a)
                   kv_a [kv_lora + rope, hidden]    k_up [heads, nope, kv_lora]    v_up [heads, v, kv_lora]
                   output [hidden, heads * v]
    MLP            gate_up [2 * intermediate, hidden]                      down    [hidden, intermediate]
    or experts     router  [experts, hidden]    experts_gate_up [experts, 2 * intermediate, hidden]
                   experts_down [experts, hidden, intermediate]    shared_gate_up, shared_down: an MLP
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pdd.engine.config import Dtype, Mla, ModelConfig, Moe

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    name: str
    shape: Shape


@dataclass(frozen=True)
class PackedTensor:
    name: str
    shape: Shape
    pieces: tuple[Piece, ...]
    dtype: Dtype | None = None
    """Stored as this whatever the pack's dtype is."""


def packed_tensors(config: ModelConfig) -> list[PackedTensor]:
    """All tensors of a pack in the order of the file. The toy has none."""
    if config.architecture == "toy":
        return []
    embedding = (config.vocab_size, config.hidden_size)
    tensors = [_whole("embed", embedding)]
    for layer in range(config.num_layers):
        tensors += _Layer(config, layer).tensors()
    tensors.append(_whole("final_norm", (config.hidden_size,)))
    if not config.tied_embeddings:
        tensors.append(_whole("head", embedding))
    return tensors


def _whole(name: str, shape: Shape, dtype: Dtype | None = None) -> PackedTensor:
    return PackedTensor(name, shape, (Piece(name, shape),), dtype)


class _Layer:
    """The tensors of one layer."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        self._config = config
        self._layer = layer
        self._prefix = f"layers.{layer}"

    def tensors(self) -> Iterator[PackedTensor]:
        hidden = (self._config.hidden_size,)
        yield self._stacked("attention_norm", attention_norm=hidden)
        yield from self._latent(self._config.mla) if self._config.mla else self._grouped()
        if self._config.output_bias:
            yield self._stacked("output_bias", output_bias=hidden)
        yield self._stacked("mlp_norm", mlp_norm=hidden)
        sparse = self._config.moe if self._config.is_sparse(self._layer) else None
        yield from self._experts(sparse) if sparse else self._mlp()

    def _grouped(self) -> Iterator[PackedTensor]:
        config = self._config
        hidden, head_dim = config.hidden_size, config.head_dim
        queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim
        yield self._stacked("qkv", q=(queries, hidden), k=(keys, hidden), v=(keys, hidden))
        if config.qkv_bias:
            yield self._stacked("qkv_bias", q_bias=(queries,), k_bias=(keys,), v_bias=(keys,))
        if config.qk_norm:
            yield self._stacked("q_norm", q_norm=(head_dim,))
            yield self._stacked("k_norm", k_norm=(head_dim,))
        yield self._stacked("output", output=(hidden, queries))

    def _latent(self, mla: Mla) -> Iterator[PackedTensor]:
        hidden, heads, rank = self._config.hidden_size, self._config.num_heads, mla.q_lora_rank
        queries = heads * mla.qk_head_dim
        if rank is None:
            yield self._stacked("q", q=(queries, hidden))
        else:
            yield self._stacked("q_a", q_a=(rank, hidden))
            if self._config.qkv_bias:
                yield self._stacked("q_a_bias", q_a_bias=(rank,))
            yield self._stacked("q_a_norm", q_a_norm=(rank,))
            yield self._stacked("q_b", q_b=(queries, rank))
        yield self._stacked("kv_a", kv_a=(mla.row_dim, hidden))
        if self._config.qkv_bias:
            yield self._stacked("kv_a_bias", kv_a_bias=(mla.row_dim,))
        yield self._stacked("kv_a_norm", kv_a_norm=(mla.kv_lora_rank,))
        yield self._stacked("k_up", k_up=(heads, mla.qk_nope_head_dim, mla.kv_lora_rank))
        yield self._stacked("v_up", v_up=(heads, mla.v_head_dim, mla.kv_lora_rank))
        yield self._stacked("output", output=(hidden, heads * mla.v_head_dim))

    def _mlp(self) -> Iterator[PackedTensor]:
        hidden, intermediate = self._config.hidden_size, self._config.intermediate_size
        yield self._stacked("gate_up", gate=(intermediate, hidden), up=(intermediate, hidden))
        if self._config.mlp_bias:
            yield self._stacked("gate_up_bias", gate_bias=(intermediate,), up_bias=(intermediate,))
        yield self._stacked("down", down=(hidden, intermediate))
        if self._config.mlp_bias:
            yield self._stacked("down_bias", down_bias=(hidden,))

    def _experts(self, moe: Moe) -> Iterator[PackedTensor]:
        """The router is small, and a rounded one would choose other experts than the authors' did."""
        hidden, intermediate = self._config.hidden_size, moe.expert_intermediate_size
        yield _whole(f"{self._prefix}.router", (moe.num_experts, hidden), "float32")
        if moe.scoring == "sigmoid":
            yield _whole(f"{self._prefix}.router_bias", (moe.num_experts,), "float32")
        yield self._of_experts(
            moe, "experts_gate_up", expert_gate=(intermediate, hidden), expert_up=(intermediate, hidden)
        )
        yield self._of_experts(moe, "experts_down", expert_down=(hidden, intermediate))
        shared = self._config.shared_intermediate_size
        if shared:
            yield self._stacked("shared_gate_up", shared_gate=(shared, hidden), shared_up=(shared, hidden))
            yield self._stacked("shared_down", shared_down=(hidden, shared))

    def _stacked(self, name: str, **pieces: Shape) -> PackedTensor:
        first = next(iter(pieces.values()))
        shape = (sum(shape[0] for shape in pieces.values()), *first[1:])
        return PackedTensor(f"{self._prefix}.{name}", shape, _pieces(self._prefix, pieces))

    def _of_experts(self, moe: Moe, name: str, **pieces: Shape) -> PackedTensor:
        """Of each expert its pieces, stacked; of all experts these, behind each other."""
        first = next(iter(pieces.values()))
        shape = (moe.num_experts, sum(shape[0] for shape in pieces.values()), *first[1:])
        all_pieces = [_pieces(f"{self._prefix}.{expert}", pieces) for expert in range(moe.num_experts)]
        return PackedTensor(f"{self._prefix}.{name}", shape, tuple(piece for one in all_pieces for piece in one))


def _pieces(prefix: str, shapes: dict[str, Shape]) -> tuple[Piece, ...]:
    return tuple(Piece(f"{prefix}.{name}", shape) for name, shape in shapes.items())
