"""Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE: grouped-query attention in every layer, and a dense or a sparse MLP."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from pdd.base.errors import ModelInvalid
from pdd.engine.attention import PagedAttention
from pdd.engine.models.decoder import Decoder, Layer, Tensors
from pdd.engine.models.dense import GroupedQueryAttention
from pdd.engine.models.experts import mlp_of
from pdd.engine.models.rope import rope_table
from pdd.engine.pack import PackedModel
from pdd.engine.parallel import Parallel
from pdd.engine.runner import LayerProgress, num_positions
from pdd.memory.arena import Arena


def load_llama(packed: PackedModel, arena: Arena, progress: LayerProgress, parallel: Parallel, threads: int) -> Decoder:
    """Raises ModelInvalid where the weights cannot be mapped."""
    torch.set_num_threads(threads)
    config, tensors = packed.config, load_tensors(packed.weights)
    table = rope_table(config.rope, config.head_dim, num_positions(config, arena.layout))
    paged = PagedAttention(arena, tensors["embed"].dtype, config.num_heads // parallel.tp, table, threads)
    layers = [
        Layer(
            attention_norm=own["attention_norm"],
            attention=GroupedQueryAttention(config, index, own, paged, parallel),
            mlp_norm=own["mlp_norm"],
            mlp=mlp_of(config, index, own, parallel),
        )
        for index, own in enumerate(tensors_of_layers(tensors, config.num_layers))
    ]
    page_tokens = arena.layout.page_tokens
    return Decoder(config, tensors, layers, page_tokens=page_tokens, parallel=parallel, progress=progress)


def tensors_of_layers(tensors: Tensors, num_layers: int) -> list[Tensors]:
    """Each layer's tensors by the last part of their names."""
    layers: list[Tensors] = [{} for _ in range(num_layers)]
    for name, tensor in tensors.items():
        if name.startswith("layers."):
            _, layer, own = name.split(".")
            layers[int(layer)][own] = tensor
    return layers


def load_tensors(path: Path) -> Tensors:
    """Views of the file's mapping, never copies: executors of one node share the weights through the page cache."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelInvalid(f"{path}: {error}; pack the model again") from error
