"""Parts of ranks cover a model once, and shapes that cannot work are named with both numbers."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from executors import executor_config
from hypothesis import given
from hypothesis import strategies as st

from pdd.base.errors import OperatorError
from pdd.engine import gathering, parallel
from pdd.engine.config import ModelConfig, Moe, Rope
from pdd.engine.sharding import check_parallel, part_of, qkv_rows, vocabulary_of

LLAMA = ModelConfig(
    architecture="llama", num_layers=2, hidden_size=48, num_heads=12, num_kv_heads=4, head_dim=8, intermediate_size=96,
    vocab_size=100, max_position=512, rms_norm_eps=1e-5, rope=Rope(base=1e4), qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip
MOE = msgspec.structs.replace(
    LLAMA,
    architecture="qwen3_moe",
    moe=Moe(num_experts=6, num_experts_per_token=2, expert_intermediate_size=10, scoring="softmax", norm_topk=True),
)


@given(vocab_size=st.integers(1, 300), tp=st.integers(1, 16))
def test_a_vocabulary_of_any_size_is_covered_once(vocab_size: int, tp: int) -> None:
    parts = [vocabulary_of(rank, tp, vocab_size) for rank in range(tp)]
    assert [token for part in parts for token in range(vocab_size)[part]] == list(range(vocab_size))
    assert max(part.stop - part.start for part in parts) == -(-vocab_size // tp)


@pytest.mark.parametrize("tp", [1, 2, 4, 12])
def test_query_heads_go_where_their_kv_head_is(tp: int) -> None:
    rows = list(range((12 + 4 + 4) * 8))
    group = LLAMA.num_heads // LLAMA.num_kv_heads
    queries_seen = []
    for rank in range(tp):
        q, k, v = ([row // 8 for row in rows[part][::8]] for part in qkv_rows(LLAMA, rank, tp))
        assert len(q) == 12 // tp
        assert sorted({head // group for head in q}) == [head - 12 for head in k] == [head - 16 for head in v]
        queries_seen += q
    assert queries_seen == list(range(12))


def test_parts_are_even() -> None:
    assert [part_of(rank, 3, 12) for rank in range(3)] == [slice(0, 4), slice(4, 8), slice(8, 12)]


@pytest.mark.parametrize(
    ("config", "shape", "faults"),
    [
        (LLAMA, (1, 1, 1), []),
        (LLAMA, (4, 3, 1), []),
        (LLAMA, (12, 1, 1), []),
        (MOE, (2, 2, 4), []),
        (MOE, (4, 1, 4), []),
        (LLAMA, (3, 1, 1), ["tp 3 and 4 KV heads: neither divides the other"]),
        (LLAMA, (8, 1, 1), ["tp 8 does not divide the model's 12 attention heads"]),
        (
            LLAMA,
            (5, 1, 1),
            [
                "tp 5 does not divide the model's 12 attention heads",
                "tp 5 does not divide the model's 96 intermediate features",
                "tp 5 and 4 KV heads: neither divides the other",
            ],
        ),
        (LLAMA, (1, 2, 2), ["ep 2, but llama has 0 experts to share"]),
        (MOE, (2, 2, 2), ["ep 2 must be 1 or dp * tp = 4: all ranks share the experts, or none"]),
        (MOE, (2, 4, 8), ["8 ranks share the model's 6 experts, so some would have none"]),
    ],
)
def test_shapes_that_cannot_work_are_named(config: ModelConfig, shape: tuple[int, int, int], faults: list[str]) -> None:
    assert check_parallel(config, *shape) == faults


def test_ranks_that_stay_away_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parallel, "JOIN_S", 0.05)
    monkeypatch.setattr(gathering, "JOIN_S", 0.05)
    config = executor_config(tmp_path, tmp_path / "meet", tp=2)
    with pytest.raises(OperatorError, match=r"node/0 rank 0: the replica's 2 ranks did not all come to .*/meet within"):
        parallel.Parallel.join(config, torch.device("cpu"))
    for rank in (0, 1):
        with pytest.raises(OperatorError, match=rf"node/0 rank {rank}: the 2 ranks of the set did not meet"):
            gathering.Gathering.join(msgspec.structs.replace(config, rank=rank))


def test_a_rendezvous_may_have_a_long_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer than the address of a Unix socket can be: it is waited for, not refused."""
    directory = tmp_path / ("d" * 120)
    directory.mkdir()
    monkeypatch.setattr(gathering, "JOIN_S", 0.05)
    with pytest.raises(OperatorError, match="timed out"):
        gathering.Gathering.join(executor_config(tmp_path, directory / "meet", tp=2))
