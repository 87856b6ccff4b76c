"""Rotary position embedding: the table of cosines and sines that the store kernel turns q and k with."""

from __future__ import annotations

import math

import torch

from pdd.engine.config import LinearScaling, Llama3Scaling, NoScaling, Rope, YarnScaling


def rope_table(rope: Rope, head_dim: int, num_positions: int) -> torch.Tensor:
    """float32 [num_positions, head_dim]: cos of head_dim / 2 angles, then their sin.

    Angles are rounded to float32 as in the reference implementation: at long positions the rounding is not small, and
    models were trained with it.
    """
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), _frequencies(rope, head_dim))
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, YarnScaling) else 1.0
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=1)


def _frequencies(rope: Rope, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions: float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / rope.base**exponents
    match rope.scaling:
        case NoScaling():
            return plain
        case LinearScaling(factor=factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, rope.base, head_dim, scaling)


def _llama3(plain: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    """How often a wave fits into the original context decides: keep it, stretch it, or in between."""
    turns = scaling.original_max_position * plain / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = kept.clamp(0, 1)
    return plain / scaling.factor * (1 - kept) + plain * kept


def _yarn(plain: torch.Tensor, base: float, head_dim: int, scaling: YarnScaling) -> torch.Tensor:
    """arXiv:2309.00071, section 3.2: dimensions that turn more than `beta_fast` times are kept, those that turn less
    than `beta_slow` times are stretched, with a ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(scaling.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width has no slope
    stretched = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * stretched + plain * (1 - stretched)
