"""Which part of a model each rank holds, and which shapes of ranks a model can have at all.

Pure numbers: the daemon checks a topology with them before anything starts, and each rank cuts its weights by them.

    tp ranks    attention heads, the MLP's intermediate features and the vocabulary, each in `tp` parts
    dp ranks    everything once more: sequences are divided, not weights
    ep ranks    all dp * tp ranks together hold the experts of a MoE layer once, in `ep` parts
"""

from __future__ import annotations

from pdd.engine.config import ModelConfig
from pdd.memory.shape import heads_of


def part_of(rank: int, num_ranks: int, size: int) -> slice:
    """The rank's share of `size` things that divide among the ranks."""
    share = size // num_ranks
    return slice(rank * share, (rank + 1) * share)


def vocabulary_of(rank: int, tp: int, vocab_size: int) -> slice:
    """The rank's token ids. Any vocabulary will do: the last parts may be shorter, or empty."""
    share = -(-vocab_size // tp)
    return slice(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def check_parallel(config: ModelConfig, tp: int, dp: int, ep: int) -> list[str]:
    """Why a replica of these ranks cannot run the model, one sentence a reason; empty where it can."""
    faults = []
    try:
        heads_of(0, tp, config.num_kv_heads)
    except ValueError as error:
        faults.append(f"{error}")
    divided = {"attention heads": config.num_heads, "intermediate features": config.intermediate_size}
    if config.architecture == "toy":
        divided = {}
    for what, size in divided.items():
        if size % tp:
            faults.append(f"tp {tp} does not divide the model's {size} {what}")
    if ep not in (1, dp * tp):
        faults.append(f"ep {ep} must be 1 or dp * tp = {dp * tp}: experts are shared by all ranks or by none")
    return faults
