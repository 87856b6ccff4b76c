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


def heads_rows(heads: range, head_dim: int, first_row: int = 0) -> slice:
    """The rows of a projection that make these heads, where head 0 begins at `first_row`."""
    return slice(first_row + heads.start * head_dim, first_row + heads.stop * head_dim)


def qkv_rows(config: ModelConfig, tp_rank: int, tp: int) -> tuple[slice, slice, slice]:
    """The rank's rows of `qkv`: of q, of k and of v. Its query heads see its KV heads and no others."""
    queries = part_of(tp_rank, tp, config.num_heads)
    keys = heads_of(tp_rank, tp, config.num_kv_heads)
    first_key = config.num_heads * config.head_dim
    first_value = first_key + config.num_kv_heads * config.head_dim
    return (
        heads_rows(range(queries.start, queries.stop), config.head_dim),
        heads_rows(keys, config.head_dim, first_key),
        heads_rows(keys, config.head_dim, first_value),
    )


def vocabulary_of(rank: int, tp: int, vocab_size: int) -> slice:
    """The rank's token ids. Any vocabulary will do: the last parts may be shorter, or empty."""
    share = -(-vocab_size // tp)
    return slice(min(rank * share, vocab_size), min((rank + 1) * share, vocab_size))


def check_parallel(config: ModelConfig, tp: int, dp: int, ep: int) -> list[str]:
    """Why a replica of these ranks cannot run the model, one sentence a reason; empty where it can."""
    faults = [f"tp {tp} does not divide the model's {size} {what}" for what, size in _divided(config) if size % tp]
    try:
        heads_of(0, tp, config.num_kv_heads)
    except ValueError as error:
        faults.append(str(error))
    num_ranks = dp * tp
    if ep not in (1, num_ranks):
        faults.append(f"ep {ep} must be 1 or dp * tp = {num_ranks}: all ranks share the experts, or none")
    num_experts = config.moe.num_experts if config.moe else 0
    if ep > 1 and not num_experts:
        faults.append(f"ep {ep}, but {config.architecture} has 0 experts to share")
    elif num_experts and num_experts < max(ep, tp):
        faults.append(f"{max(ep, tp)} ranks share the model's {num_experts} experts, so some would have none")
    return faults


def _divided(config: ModelConfig) -> list[tuple[str, int]]:
    """What tensor-parallel ranks have equal parts of."""
    if config.architecture == "toy":
        return []
    sizes = [("attention heads", config.num_heads), ("intermediate features", config.intermediate_size)]
    if all(config.is_sparse(layer) for layer in range(config.num_layers)):
        sizes.pop()
    return [*sizes, ("intermediate features of shared experts", config.shared_intermediate_size)]
