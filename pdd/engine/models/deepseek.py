"""DeepSeek-V3: latent attention, and experts in all layers but the first few."""

from __future__ import annotations

import torch

from pdd.base.errors import ModelInvalid
from pdd.engine.models.decoder import Decoder, Layer
from pdd.engine.models.experts import mlp_of
from pdd.engine.models.llama import load_tensors, tensors_of_layers
from pdd.engine.models.mla import LatentAttention, PagedLatents
from pdd.engine.models.rope import rope_table
from pdd.engine.pack import PackedModel
from pdd.engine.parallel import Parallel
from pdd.engine.runner import LayerProgress, num_positions
from pdd.engine.sharding import part_of
from pdd.memory.arena import Arena


def load_deepseek(
    packed: PackedModel, arena: Arena, progress: LayerProgress, parallel: Parallel, threads: int
) -> Decoder:
    """Raises ModelInvalid where the weights cannot be mapped."""
    config = packed.config
    if config.mla is None:
        raise ModelInvalid(f"{packed.dir}: architecture {config.architecture!r} without latent attention")
    torch.set_num_threads(threads)
    tensors = load_tensors(packed.weights)
    table = rope_table(config.rope, config.mla.qk_rope_head_dim, num_positions(config, arena.layout))
    heads = part_of(parallel.tp_rank, parallel.tp, config.num_heads)
    latents = PagedLatents(arena, tensors["embed"].dtype, config.num_heads // parallel.tp, table, threads)
    layers = [
        Layer(
            attention_norm=own["attention_norm"],
            attention=LatentAttention(config.mla, heads, index, own, latents),
            mlp_norm=own["mlp_norm"],
            mlp=mlp_of(config, index, own, parallel),
        )
        for index, own in enumerate(tensors_of_layers(tensors, config.num_layers))
    ]
    page_tokens = arena.layout.page_tokens
    return Decoder(config, tensors, layers, page_tokens=page_tokens, parallel=parallel, progress=progress)
