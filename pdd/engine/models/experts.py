"""A sparse layer's MLP: many experts, of which each token sees a few, shared by the ranks of a replica.

    x --route--> weights [tokens, experts] --dispatch--> this rank's experts --combine--> this rank's summand

Whole experts are divided among ranks (one is a contiguous piece of the pack, so it is mapped and never copied):

    every token is on every rank that shares the experts     dispatch and combine do nothing: a rank computes all tokens
    (ep 1: the tp ranks of a set; or dp 1: all ranks)        for its own experts, and the sum over tp ranks is the layer

    ep over several sets (dp > 1)                            each tp rank sends its share of the set's tokens to the
                                                             ranks that hold their experts, and adds up what returns;
                                                             of the other tokens it says nothing (zeros)

Shared experts are one dense MLP, divided like any other.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from pdd.engine.config import ModelConfig, Moe
from pdd.engine.models.decoder import Mlp, Tensors
from pdd.engine.models.dense import DenseMlp
from pdd.engine.models.layers import gated_silu, linear
from pdd.engine.models.router import Router
from pdd.engine.parallel import Parallel

Dispatch = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From x [tokens, hidden] and weights [tokens, all experts] to this rank's summand of [tokens, hidden]."""


def mlp_of(config: ModelConfig, layer: int, tensors: Tensors, parallel: Parallel) -> Mlp:
    """The rank's part of a layer's MLP, sparse or dense. `tensors`: of that layer (weights/tensors.py)."""
    if config.moe is None or not config.is_sparse(layer):
        return DenseMlp.of(tensors, "", parallel)
    router = Router(config.moe, tensors["router"], tensors.get("router_bias"))
    shared = DenseMlp.of(tensors, "shared_", parallel) if config.moe.num_shared_experts else None
    return SparseMlp(router, _dispatch_of(config.moe, tensors, parallel), shared)


def experts_of(rank: int, num_ranks: int, num_experts: int) -> slice:
    """The rank's experts; where they do not divide, some ranks have one more."""
    return slice(num_experts * rank // num_ranks, num_experts * (rank + 1) // num_ranks)


class SparseMlp:
    def __init__(self, router: Router, dispatch: Dispatch, shared: DenseMlp | None) -> None:
        self._router = router
        self._dispatch = dispatch
        self._shared = shared

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self._dispatch(x, self._router(x))
        return y if self._shared is None else y.add_(self._shared(x))


class Experts:
    """Some experts' MLPs. gate_up: [experts, 2 * intermediate, hidden], down: [experts, hidden, intermediate]."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        self._gate_up = gate_up
        self._down = down

    def __len__(self) -> int:
        return len(self._down)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The weighted sum of their answers, [tokens, hidden], summed in float32. weights: [tokens, experts]."""
        total = x.new_zeros(x.shape, dtype=torch.float32)
        expert_of_pair, token_of_pair = weights.t().nonzero(as_tuple=True)
        counts = expert_of_pair.bincount(minlength=len(self)).tolist()
        for expert, tokens in enumerate(torch.split(token_of_pair, counts)):
            if len(tokens):
                hidden = gated_silu(linear(x[tokens], self._gate_up[expert], None))
                answer = linear(hidden, self._down[expert], None)
                total.index_add_(0, tokens, answer * weights[tokens, expert, None])
        return total.to(x.dtype)


class LocalDispatch:
    """Every token is here."""

    def __init__(self, experts: Experts, part: slice) -> None:
        self._experts = experts
        self._part = part

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self._experts(x, weights[:, self._part])


class ExchangeDispatch:
    """Tokens travel. A token goes once to each rank that holds one or more of its experts, with their weights."""

    def __init__(self, experts: Experts, num_experts: int, parallel: Parallel) -> None:
        self._experts = experts
        self._parallel = parallel
        self._parts = [experts_of(rank, parallel.ep, num_experts) for rank in range(parallel.ep)]
        self._width = -(-num_experts // parallel.ep)

    def __call__(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        rank, num_ranks = self._parallel.tp_rank, self._parallel.tp
        ours = slice(len(x) * rank // num_ranks, len(x) * (rank + 1) // num_ranks)
        tokens, routes = self._routes(weights[ours])
        send = [len(one) for one in tokens]
        receive = self._parallel.exchange_counts(send)
        sent = torch.cat(tokens)
        theirs = self._parallel.exchange(x[ours][sent], send, receive)
        their_weights = self._parallel.exchange(torch.cat(routes), send, receive)
        answers = self._experts(theirs, their_weights[:, : len(self._experts)])
        returned = self._parallel.exchange(answers, receive, send)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        total[ours].index_add_(0, sent, returned.float())
        return total.to(x.dtype)

    def _routes(self, weights: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """For each rank the tokens that it gets, and the weights of its experts for them, all equally wide."""
        tokens, routes = [], []
        for part in self._parts:
            theirs = weights[:, part]
            tokens.append((theirs != 0).any(dim=1).nonzero()[:, 0])
            routes.append(functional.pad(theirs[tokens[-1]], (0, self._width - theirs.shape[1])))
        return tokens, routes


def _dispatch_of(moe: Moe, tensors: Tensors, parallel: Parallel) -> Dispatch:
    shares = (parallel.ep_rank, parallel.ep) if parallel.ep > 1 else (parallel.tp_rank, parallel.tp)
    part = experts_of(*shares, moe.num_experts)
    experts = Experts(tensors["experts_gate_up"][part], tensors["experts_down"][part])
    if parallel.ep > 1 and parallel.dp > 1:
        return ExchangeDispatch(experts, moe.num_experts, parallel)
    return LocalDispatch(experts, part)
