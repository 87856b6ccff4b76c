"""Routing and experts on their own: against loops over tokens, and divided among ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import silu

from pdd.engine.config import ModelConfig, Moe, Rope
from pdd.engine.models.experts import experts_of, mlp_of
from pdd.engine.models.router import Router
from pdd.engine.parallel import Parallel

HIDDEN = 12
Tensors = dict[str, torch.Tensor]


def moe_of(**changes: Any) -> Moe:
    numbers = {"num_experts": 7, "num_experts_per_token": 3, "expert_intermediate_size": 5, "scoring": "softmax"}
    return Moe(**numbers | {"norm_topk": True} | changes)


def config_of(moe: Moe) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3_moe", num_layers=1, hidden_size=HIDDEN, num_heads=1, num_kv_heads=1, head_dim=2,
        intermediate_size=8, vocab_size=9, max_position=9, rms_norm_eps=1e-6, rope=Rope(base=1e4), qkv_bias=False,
        output_bias=False, mlp_bias=False, qk_norm=True, tied_embeddings=False, moe=moe,
    )  # fmt: skip


def tensors_of(moe: Moe, dtype: torch.dtype = torch.float32) -> Tensors:
    experts, size, shared = moe.num_experts, moe.expert_intermediate_size, moe.num_shared_experts
    tensors = {
        "experts_gate_up": torch.randn(experts, 2 * size, HIDDEN),
        "experts_down": torch.randn(experts, HIDDEN, size),
        "shared_gate_up": torch.randn(2 * shared * size, HIDDEN),
        "shared_down": torch.randn(HIDDEN, shared * size),
    }
    router = {"router": torch.randn(experts, HIDDEN)}
    if moe.scoring == "sigmoid":
        router["router_bias"] = torch.randn(experts)
    return {name: tensor.to(dtype) for name, tensor in tensors.items()} | router


def plain_routing(moe: Moe, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    """Token by token, as the papers say it."""
    size = moe.num_experts // moe.num_groups
    weights = torch.zeros(len(x), moe.num_experts)
    for token, row in enumerate(x @ tensors["router"].T):
        scores = row.softmax(0) if moe.scoring == "softmax" else row.sigmoid()
        merit = scores + tensors["router_bias"] if moe.scoring == "sigmoid" else scores
        worth = [sum(sorted(merit[group * size :][:size].tolist())[-2:]) for group in range(moe.num_groups)]
        groups = sorted(range(moe.num_groups), key=lambda group: -worth[group])[: moe.top_groups]
        eligible = [expert for expert in range(moe.num_experts) if expert // size in groups]
        chosen = sorted(eligible, key=lambda expert: -merit[expert])[: moe.num_experts_per_token]
        total = scores[chosen].sum() if moe.norm_topk else 1.0
        weights[token, chosen] = scores[chosen] / total * moe.routed_scaling
    return weights


def plain_mlp(moe: Moe, tensors: Tensors, x: torch.Tensor) -> torch.Tensor:
    def gated(gate_up: torch.Tensor, down: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        gate, up = (gate_up @ row).chunk(2)
        return down @ (silu(gate) * up)

    rows = []
    for row, weights in zip(x, plain_routing(moe, tensors, x), strict=True):
        y = gated(tensors["shared_gate_up"], tensors["shared_down"], row) if moe.num_shared_experts else 0 * row
        for expert, weight in enumerate(weights):
            y = y + weight * gated(tensors["experts_gate_up"][expert], tensors["experts_down"][expert], row)
        rows.append(y)
    return torch.stack(rows) if rows else x.clone()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_routing_is_what_the_papers_say(data: st.DataObject) -> None:
    torch.manual_seed(data.draw(st.integers(0, 1 << 30)))
    num_groups, size = data.draw(st.integers(1, 5)), data.draw(st.integers(2, 6))
    top_groups = data.draw(st.integers(1, num_groups))
    moe = moe_of(
        num_experts=num_groups * size,
        num_groups=num_groups,
        top_groups=top_groups,
        num_experts_per_token=data.draw(st.integers(1, top_groups * size)),
        scoring=data.draw(st.sampled_from(["softmax", "sigmoid"])),
        norm_topk=data.draw(st.booleans()),
        routed_scaling=data.draw(st.sampled_from([1.0, 2.5])),
    )
    tensors, x = tensors_of(moe), torch.randn(data.draw(st.integers(0, 9)), HIDDEN)
    router = Router(moe, tensors["router"], tensors.get("router_bias"))
    torch.testing.assert_close(router(x), plain_routing(moe, tensors, x), rtol=1e-5, atol=1e-6)


class Ranks:
    """Ranks that are threads of this process: their collectives move tensors by way of a table."""

    def __init__(self, tp: int, dp: int, ep: int) -> None:
        self.shape = (tp, dp, ep)
        self.barrier = threading.Barrier(tp * dp, timeout=30)
        self.table: dict[tuple[int, int], Any] = {}

    def run(self, compute: Callable[[Parallel], torch.Tensor]) -> list[torch.Tensor]:
        results: dict[int, torch.Tensor] = {}

        def rank_main(rank: int) -> None:
            try:
                results[rank] = compute(cast("Parallel", Rank(self, rank)))
            except BaseException:
                self.barrier.abort()
                raise

        threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(self.barrier.parties)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [results[rank] for rank in sorted(results)]


class Rank:
    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self._rank = ranks, rank
        self.tp, self.dp, self.ep = ranks.shape
        self.dp_rank, self.tp_rank = divmod(rank, self.tp)
        self.ep_rank = rank if self.ep > 1 else 0

    def exchange_counts(self, counts: list[int]) -> list[int]:
        return self._exchange(counts)

    def exchange(self, rows: torch.Tensor, send: list[int], receive: list[int]) -> torch.Tensor:
        assert len(rows) == sum(send)
        received = self._exchange(list(rows.split(send)))
        assert [len(one) for one in received] == receive
        return torch.cat(received)

    def _exchange(self, parts: list[Any]) -> list[Any]:
        for to, part in enumerate(parts):
            self._ranks.table[self._rank, to] = part
        self._ranks.barrier.wait()
        received = [self._ranks.table[source, self._rank] for source in range(len(parts))]
        self._ranks.barrier.wait()
        return received


@pytest.mark.parametrize("num_shared_experts", [0, 2])
@pytest.mark.parametrize(
    ("tp", "dp", "ep"), [(1, 1, 1), (2, 1, 1), (5, 1, 1), (2, 1, 2), (1, 2, 2), (1, 4, 4), (2, 2, 4), (2, 2, 1)]
)
def test_the_summands_of_a_set_are_the_whole(tp: int, dp: int, ep: int, num_shared_experts: int) -> None:
    """Of any shape of ranks; one set has no tokens, another fewer than it has ranks."""
    torch.manual_seed(3)
    moe = moe_of(num_shared_experts=num_shared_experts, expert_intermediate_size=10, scoring="sigmoid")
    tensors = tensors_of(moe)
    tokens = [torch.randn(count, HIDDEN) for count in (23, 0, 1, 8)[:dp]]

    def compute(parallel: Parallel) -> torch.Tensor:
        return mlp_of(config_of(moe), 0, tensors, parallel)(tokens[parallel.dp_rank])

    summands = Ranks(tp, dp, ep).run(compute)
    assert len(summands) == tp * dp
    for index, x in enumerate(tokens):
        total = torch.stack(summands[index * tp : (index + 1) * tp]).sum(0)
        torch.testing.assert_close(total, plain_mlp(moe, tensors, x), rtol=1e-4, atol=1e-4)


def test_a_rank_with_experts_holds_no_others() -> None:
    """Sharing experts means to compute nothing that another rank computes: all others' weights may be damaged."""
    torch.manual_seed(3)
    moe = moe_of()
    whole = tensors_of(moe)
    x = torch.randn(9, HIDDEN)

    def compute(parallel: Parallel) -> torch.Tensor:
        ours = experts_of(parallel.ep_rank, parallel.ep, moe.num_experts)
        tensors = dict(whole)
        for name in ("experts_gate_up", "experts_down"):
            tensors[name] = torch.full_like(whole[name], torch.nan)
            tensors[name][ours] = whole[name][ours]
        return mlp_of(config_of(moe), 0, tensors, parallel)(x)

    for summand in Ranks(1, 3, 3).run(compute):
        torch.testing.assert_close(summand, plain_mlp(moe, whole, x), rtol=1e-4, atol=1e-4)


@given(num_experts=st.integers(1, 300), num_ranks=st.integers(1, 40))
def test_every_expert_has_one_rank(num_experts: int, num_ranks: int) -> None:
    parts = [experts_of(rank, num_ranks, num_experts) for rank in range(num_ranks)]
    assert [expert for part in parts for expert in range(part.start, part.stop)] == list(range(num_experts))
    sizes = [part.stop - part.start for part in parts]
    assert max(sizes) - min(sizes) <= 1


def test_sums_over_experts_are_not_rounded_on_the_way() -> None:
    """bfloat16 answers are added up in float32, wherever they were computed."""
    torch.manual_seed(3)
    moe = moe_of(num_experts=64, num_experts_per_token=64)
    tensors = tensors_of(moe, torch.bfloat16)
    x = torch.randn(5, HIDDEN).bfloat16()
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    expected = plain_mlp(moe, wide, x.float())
    actual = mlp_of(config_of(moe), 0, tensors, Parallel.solo())(x)
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=0.02 * float(expected.abs().max()))
