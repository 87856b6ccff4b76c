"""Where Hugging Face lays tensors of experts and of latent attention out in another way than a pack does.

Tensors that come differently are replaced by views that read the file's rows in the pack's order.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np

from pdd.engine.config import Mla, ModelConfig, Moe
from pdd.engine.weights.huggingface_moe import interleaves_rope, num_further_layers
from pdd.engine.weights.source import RowOrder, StoredTensor, check_shape

K_UP, V_UP = "self_attn.kv_b_proj.k_up", "self_attn.kv_b_proj.v_up"
"""The two halves of `self_attn.kv_b_proj.weight` (of each head first the rows that make K, then those that make V)."""
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.")
_FUSED = re.compile(r"(model\.layers\.\d+\.mlp\.experts)\.(gate_up|down)_proj")

Tensors = dict[str, StoredTensor]
_log = logging.getLogger(__name__)


def arranged(path: Path, config: ModelConfig, stored: Tensors) -> Tensors:
    """`stored` as it should be named and ordered; `path` is the configuration's. Raises ModelInvalid for a tensor that
    cannot be taken apart because its shape is another one."""
    if config.moe:
        stored = _experts_apart(config.moe, config.hidden_size, stored)
    if config.mla:
        stored = _without_further_layers(path, config, stored)
        stored = _latents(config, config.mla, stored)
        if interleaves_rope(path):
            stored = _halves_rotated(config, config.mla, stored)
    return stored


def _experts_apart(moe: Moe, hidden: int, stored: Tensors) -> Tensors:
    """One tensor for each expert, also where all of a layer are stored as one."""
    result, intermediate = {}, moe.expert_intermediate_size
    for name, tensor in stored.items():
        fused = _FUSED.fullmatch(name)
        if not fused:
            result[name] = tensor
            continue
        gate_up = fused[2] == "gate_up"
        shape = (2 * intermediate, hidden) if gate_up else (hidden, intermediate)
        check_shape(tensor, (moe.num_experts, *shape))
        parts = ("gate", "up") if gate_up else ("down",)
        num_rows, width = shape[0] // len(parts), shape[1]
        for at in range(moe.num_experts * len(parts)):
            rows = np.arange(at * num_rows, (at + 1) * num_rows, dtype=np.intp)
            expert, part = divmod(at, len(parts))
            result[f"{fused[1]}.{expert}.{parts[part]}_proj.weight"] = tensor.picked(rows, (num_rows, width))
    return result


def _without_further_layers(path: Path, config: ModelConfig, stored: Tensors) -> Tensors:
    """The layers that guess further tokens are no part of the answer's distribution."""
    last = config.num_layers + num_further_layers(path)
    further = {name for name in stored if (at := _LAYER.match(name)) and config.num_layers <= int(at[1]) < last}
    if further:
        _log.warning("%s: the layers from %d on, which predict further tokens, are left out", path, config.num_layers)
    return {name: tensor for name, tensor in stored.items() if name not in further}


def _latents(config: ModelConfig, mla: Mla, stored: Tensors) -> Tensors:
    """`kv_b_proj` in two."""
    result, suffix = {}, "self_attn.kv_b_proj.weight"
    nope, value, rank = mla.qk_nope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    for name, tensor in stored.items():
        if not name.endswith(suffix):
            result[name] = tensor
            continue
        check_shape(tensor, (config.num_heads * (nope + value), rank))
        rows = np.arange(tensor.num_rows, dtype=np.intp).reshape(config.num_heads, -1)
        prefix = name.removesuffix(suffix)
        result[prefix + K_UP] = tensor.picked(rows[:, :nope].reshape(-1), (config.num_heads, nope, rank))
        result[prefix + V_UP] = tensor.picked(rows[:, nope:].reshape(-1), (config.num_heads, value, rank))
    return result


def _halves_rotated(config: ModelConfig, mla: Mla, stored: Tensors) -> Tensors:
    """The rotated rows of q and k in the rotate-half order."""
    queries = (config.num_heads, mla.qk_nope_head_dim)
    heads = {"q_proj": queries, "q_b_proj": queries, "kv_a_proj_with_mqa": (1, mla.kv_lora_rank)}
    result = dict(stored)
    for name, tensor in stored.items():
        num_heads, num_plain = heads.get(name.split(".")[-2:][0], (0, 0))
        if num_heads and tensor.num_rows == num_heads * (num_plain + mla.qk_rope_head_dim):
            order = _rotate_half_order(num_heads, num_plain, mla.qk_rope_head_dim)
            result[name] = tensor.picked(order, tensor.shape)
    return result


def _rotate_half_order(num_heads: int, num_plain: int, num_rotated: int) -> RowOrder:
    """Where the rows of the rotate-half order lie in the interleaved one: of a head's rows it takes the plain ones as
    they are, and of its rotated rows 0 1 2 3 4 5 it picks 0 2 4 1 3 5."""
    rows = np.arange(num_heads * (num_plain + num_rotated), dtype=np.intp).reshape(num_heads, -1)
    rotated = rows[:, num_plain:].reshape(num_heads, num_rotated // 2, 2).swapaxes(1, 2).reshape(num_heads, -1)
    return np.concatenate((rows[:, :num_plain], rotated), axis=1).reshape(-1)
