"""Which experts a token goes to, and what each one's answer weighs."""

from __future__ import annotations

import torch

from pdd.engine.config import Moe
from pdd.engine.models.layers import linear

_TINY = 1e-20
"""Keeps the sum of no weight at all from dividing by zero."""


class Router:
    """`weight`: float32 [experts, hidden]; `bias`: float32 [experts], of sigmoid routers. Always the whole router: each
    rank routes alike, to the bit, what it has alike."""

    def __init__(self, moe: Moe, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._moe = moe
        self._weight = weight
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """float32 [tokens, experts]: weights of the chosen experts, 0 for all others."""
        moe = self._moe
        logits = linear(x.float(), self._weight, None)
        scores = logits.softmax(dim=-1) if moe.scoring == "softmax" else logits.sigmoid()
        merit = scores if self._bias is None else scores + self._bias
        if moe.num_groups > 1:
            merit = self._within_top_groups(merit)
        chosen = merit.topk(moe.num_experts_per_token).indices
        weights = scores.gather(1, chosen)
        if moe.norm_topk:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
        return torch.zeros_like(scores).scatter_(1, chosen, weights * moe.routed_scaling)

    def _within_top_groups(self, merit: torch.Tensor) -> torch.Tensor:
        """Experts outside a token's best groups can no longer be chosen."""
        num_groups = self._moe.num_groups
        groups = merit.view(len(merit), num_groups, self._moe.num_experts // num_groups)
        best = groups.topk(2).values.sum(dim=-1).topk(self._moe.top_groups).indices
        excluded = torch.ones_like(groups[:, :, 0], dtype=torch.bool).scatter_(1, best, False)
        return groups.masked_fill(excluded[:, :, None], -torch.inf).view_as(merit)
