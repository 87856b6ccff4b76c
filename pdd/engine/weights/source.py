"""What every kind of model file is read as before it is packed, and which tensors a pack is made of.

A packed tensor is one or more *pieces* stacked along their rows: `layers.0.qkv` is made of the pieces `layers.0.q`,
`layers.0.k` and `layers.0.v`. A source names its own tensors by piece; nothing else differs between kinds of files.

    Hugging Face directory  --.
    GGUF file               ---+-->  Source  --pack.py-->  config.json, text.json, tokenizer.json, weights-*.safetensors
    toy directory           --'
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig, TextConfig

Floats = npt.NDArray[np.float32]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file holds it; `rows(start, stop)` reads [start, stop) of the first axis as float32."""

    where: str
    """File and name, for messages."""
    shape: Shape
    rows: Callable[[int, int], Floats]


@dataclass(frozen=True)
class Source:
    """A model that was read far enough to know that it can be packed."""

    path: Path
    config: ModelConfig
    text: TextConfig
    tokenizer_json: bytes | None
    pieces: Mapping[str, StoredTensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Piece:
    name: str
    shape: Shape


@dataclass(frozen=True)
class PackedTensor:
    name: str
    pieces: tuple[Piece, ...]

    @property
    def shape(self) -> Shape:
        return (sum(piece.shape[0] for piece in self.pieces), *self.pieces[0].shape[1:])


def packed_tensors(config: ModelConfig) -> list[PackedTensor]:
    """All tensors of a pack in the order of the file. The toy has none."""
    if config.architecture == "toy":
        return []
    embedding = (config.vocab_size, config.hidden_size)
    tensors = [_whole("embed", embedding)]
    for layer in range(config.num_layers):
        tensors += _layer(config, f"layers.{layer}")
    tensors.append(_whole("final_norm", (config.hidden_size,)))
    if not config.tied_embeddings:
        tensors.append(_whole("head", embedding))
    return tensors


def bind(
    path: Path,
    config: ModelConfig,
    names: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    unused: frozenset[str],
) -> dict[str, StoredTensor]:
    """The stored tensor of each piece, where `names` maps the last word of a piece (with `{}` for the layer, if it has
    one) to the name in the files. Raises ModelInvalid for a tensor that is missing, has the wrong shape, or
    has no place in the network (and is not in `unused`): leaving it out would silently compute something else."""
    pieces, missing, known = {}, [], set(unused)
    for tensor in packed_tensors(config):
        for piece in tensor.pieces:
            *prefix, word = piece.name.split(".")
            name = names[word].format(prefix[-1]) if prefix else names[word]
            known.add(name)
            if name not in stored:
                missing.append(name)
                continue
            pieces[piece.name] = stored[name]
            if stored[name].shape != piece.shape:
                raise ModelInvalid(
                    f"{stored[name].where} has shape {list(stored[name].shape)}, but the model's configuration calls "
                    f"for {list(piece.shape)}: the files do not belong together; fetch the model again"
                )
    if missing:
        raise ModelInvalid(
            f"{path}: {len(missing)} tensors are missing, for example {missing[0]!r}: the download is incomplete, or "
            f"the configuration describes another model; fetch the model again"
        )
    if strange := sorted(set(stored) - known):
        raise ModelInvalid(
            f"{path}: {len(strange)} tensors have no place in this kind of model, for example {strange[0]!r}: it is a "
            f"variant (quantised, adapted, or with extra parts) that pdd does not run"
        )
    return pieces


def _whole(name: str, shape: Shape) -> PackedTensor:
    return PackedTensor(name, (Piece(name, shape),))


def _layer(config: ModelConfig, prefix: str) -> list[PackedTensor]:
    hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_heads * head_dim, config.num_kv_heads * head_dim

    def stacked(name: str, **pieces: Shape) -> PackedTensor:
        return PackedTensor(f"{prefix}.{name}", tuple(Piece(f"{prefix}.{key}", pieces[key]) for key in pieces))

    tensors = [
        stacked("attention_norm", attention_norm=(hidden,)),
        stacked("qkv", q=(queries, hidden), k=(keys, hidden), v=(keys, hidden)),
    ]
    if config.qkv_bias:
        tensors.append(stacked("qkv_bias", q_bias=(queries,), k_bias=(keys,), v_bias=(keys,)))
    if config.qk_norm:
        tensors += [stacked("q_norm", q_norm=(head_dim,)), stacked("k_norm", k_norm=(head_dim,))]
    tensors.append(stacked("output", output=(hidden, queries)))
    if config.output_bias:
        tensors.append(stacked("output_bias", output_bias=(hidden,)))
    tensors += [
        stacked("mlp_norm", mlp_norm=(hidden,)),
        stacked("gate_up", gate=(intermediate, hidden), up=(intermediate, hidden)),
    ]
    if config.mlp_bias:
        tensors.append(stacked("gate_up_bias", gate_bias=(intermediate,), up_bias=(intermediate,)))
    tensors.append(stacked("down", down=(hidden, intermediate)))
    if config.mlp_bias:
        tensors.append(stacked("down_bias", down_bias=(hidden,)))
    return tensors
