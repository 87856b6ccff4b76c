"""The dense parts of a transformer layer on a CPU. Tensors are [tokens, features], contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

_FEW_ROWS = 8
"""Up to here the transposed product is faster in float32: MKL's sgemm then splits the weight's rows, not the tokens."""


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x @ weight.T + bias. weight: [out, in]; some columns of a wider tensor will do, they are not copied."""
    if len(x) > _FEW_ROWS or x.dtype != torch.float32 or not weight.is_contiguous():
        return functional.linear(x, weight, bias)
    # A single token is run twice: MKL's matrix-vector product uses one thread and reads memory at half the speed.
    rows = x if len(x) > 1 else torch.cat((x, x))
    y = torch.mm(weight, rows.t()).t()[: len(x)].contiguous()
    return y if bias is None else y.add_(bias)


@dataclass(frozen=True)
class Linear:
    """A rank's part of x @ weight.T + bias. Parts are views of the pack: ranks of one node share its pages.

    `weights` lie below one another: of `qkv`, for example, a rank holds some rows of q, some of k and some of v.
    """

    weights: tuple[torch.Tensor, ...]
    bias: torch.Tensor | None

    @classmethod
    def rows(cls, weight: torch.Tensor, bias: torch.Tensor | None, parts: Sequence[slice]) -> Linear:
        """Some of the outputs; x is whole, and so is what the rank makes of it."""
        joined = _joined(parts)
        return cls(
            tuple(weight[part] for part in joined),
            bias if bias is None else torch.cat([bias[part] for part in joined]),
        )

    @classmethod
    def columns(cls, weight: torch.Tensor, bias: torch.Tensor | None, part: slice) -> Linear:
        """Some of the inputs: x is the rank's part, and what comes out is a summand of the whole. The summand that the
        first part gives has the bias in it."""
        return cls((weight[:, part],), bias if part.start == 0 else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.weights) == 1:
            return linear(x, self.weights[0], self.bias)
        y = torch.cat([linear(x, weight, None) for weight in self.weights], dim=1)
        return y if self.bias is None else y.add_(self.bias)


def _joined(parts: Sequence[slice]) -> list[slice]:
    """The same rows with neighbours made one: a rank that holds everything has one weight."""
    joined: list[slice] = []
    for part in parts:
        if joined and joined[-1].stop == part.start:
            part = slice(joined.pop().start, part.stop)  # noqa: PLW2901
        joined.append(part)
    return joined


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight over the last axis (arXiv:1910.07467)."""
    return functional.rms_norm(x, weight.shape, weight, epsilon)


def gated_silu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, where `gate_up` is [tokens, gate features then up features] (arXiv:2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
