"""The dense parts of a transformer layer on a CPU. Tensors are [tokens, features], contiguous."""

from __future__ import annotations

import torch
from torch.nn import functional

_FEW_ROWS = 8
"""Up to here the transposed product is faster in float32: MKL's sgemm then splits the weight's rows, not the tokens."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. weight: [out, in]."""
    if len(x) > _FEW_ROWS or x.dtype != torch.float32:
        return functional.linear(x, weight, bias)
    # A single token is run twice: MKL's matrix-vector product uses one thread and reads memory at half the speed.
    rows = x if len(x) > 1 else torch.cat((x, x))
    y = torch.mm(weight, rows.t()).t()[: len(x)].contiguous()
    return y if bias is None else y.add_(bias)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (arXiv:1910.07467)."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where `gate_up` is [tokens, gate features then up features] (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
