"""From a packed model to a network that runs on this rank: the one place that knows all architectures."""

from __future__ import annotations

import torch

from pdd.base.errors import InvariantBroken
from pdd.engine.models.deepseek import load_deepseek
from pdd.engine.models.llama import load_llama
from pdd.engine.pack import PackedModel
from pdd.engine.parallel import Parallel
from pdd.engine.protocol import ExecutorConfig
from pdd.engine.runner import LayerProgress, Model
from pdd.memory.arena import Arena

_LOADERS = {"llama": load_llama, "qwen3_moe": load_llama, "deepseek_v3": load_deepseek}


def load_model(packed: PackedModel, arena: Arena, progress: LayerProgress, config: ExecutorConfig) -> Model:
    """Returns when all ranks of the replica are there. Raises ModelInvalid where the weights cannot be mapped,
    OperatorError where ranks stay away."""
    architecture = packed.config.architecture
    if architecture not in _LOADERS:
        raise InvariantBroken(f"{packed.dir} is of architecture {architecture}, which has no loader")
    torch.set_num_threads(config.threads)
    parallel = Parallel.join(config, torch.device("cpu"))
    return _LOADERS[architecture](packed, arena, progress, parallel, config.threads)
