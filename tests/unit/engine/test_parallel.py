"""Ranks of one replica as real processes: what they compute together is what one rank computes alone."""

from __future__ import annotations

import os
import re
import select
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from executors import Executor, ReplicaOfRanks, executor_config, replica_of_ranks
from tiny_checkpoints import byte_tokenizer

from pdd.base.ids import SequenceId
from pdd.engine.config import Mla, ModelConfig, Rope, TextConfig
from pdd.engine.pack import PackedModel, pack
from pdd.engine.protocol import Row, Sampled, StartSequence, Step
from pdd.engine.toy import continuation
from pdd.lifecycle.request import SamplingParams
from pdd.memory.shape import heads_of

TOY = ModelConfig(
    architecture="toy", num_layers=3, hidden_size=0, num_heads=6, num_kv_heads=2, head_dim=8, intermediate_size=0,
    vocab_size=50_000, max_position=512, rms_norm_eps=1e-5, rope=Rope(base=1e4), qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip
LATENT = Mla(q_lora_rank=None, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, score_scale=1.0)
"""A cache of one plane, and one head of 8, which every rank holds."""
PROMPT = [(17 * at) % 90 + 3 for at in range(41)]
PROMPTS = [PROMPT, PROMPT[:5], PROMPT[::-1][:30], PROMPT[7:20]]
PAGES = [9, 3, 7, 1, 8, 2, 0, 4, 6, 5, 11, 10, 15, 12, 14, 13]

SMALL: dict[str, Any] = {
    "vocab_size": 271, "hidden_size": 48, "num_hidden_layers": 3, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
WIDE = SMALL | {"vocab_size": 4001, "hidden_size": 512, "initializer_range": 0.05}
MODELS: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, intermediate_size=64, attention_bias=True,
            mlp_bias=True, head_dim=20,
        )
    ),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(
        transformers.Qwen3Config(
            **SMALL, num_attention_heads=6, num_key_value_heads=3, intermediate_size=96, head_dim=16,
            tie_word_embeddings=True,
        )
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **WIDE, num_attention_heads=8, num_key_value_heads=2, intermediate_size=2048, tie_word_embeddings=True
        )
    ),
    "qwen3-moe": lambda: transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            **SMALL, num_attention_heads=6, num_key_value_heads=2, intermediate_size=64, head_dim=16, num_experts=7,
            num_experts_per_tok=3, moe_intermediate_size=20, mlp_only_layers=[1], norm_topk_prob=True,
        )
    ),
    "deepseek": lambda: transformers.DeepseekV3ForCausalLM(
        transformers.DeepseekV3Config(
            **SMALL, num_attention_heads=6, num_key_value_heads=6, intermediate_size=64, q_lora_rank=28,
            kv_lora_rank=24, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=16,
            n_shared_experts=2, n_group=4, topk_group=2, num_experts_per_tok=3, moe_intermediate_size=20,
            first_k_dense_replace=1,
        )
    ),
}  # fmt: skip

GATED_STORE = """
import sys
from pdd.engine import toy, worker
from pdd.engine.models import dense, llama

gate = open({gate!r}, "rb", buffering=0)

class GatedToy(toy.ToyModel):
    def _store(self, *arguments):
        gate.read(1)
        return super()._store(*arguments)

class GatedAttention(dense.GroupedQueryAttention):
    def store(self, *arguments):
        gate.read(1)
        return super().store(*arguments)

worker.ToyModel = GatedToy
llama.GroupedQueryAttention = GatedAttention
sys.exit(worker.main())
"""
"""A rank that stores a layer's KV when a byte comes through the gate, and not before."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], PackedModel]:
    """Packed models of random weights, made when first asked for."""
    made: dict[str, PackedModel] = {}

    def model(name: str) -> PackedModel:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            torch.manual_seed(5)
            network = MODELS[name]()
            for parameter in network.parameters():
                if parameter.dim() == 1:  # norms are ones and biases zeros: both would hide a mistake
                    torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
            network.save_pretrained(path)
            byte_tokenizer().save(str(path / "tokenizer.json"))
            made[name] = pack(path, "float32", path / "cache")
        return made[name]

    return model


@pytest.fixture
def toy_dir(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(TOY))
    (tmp_path / "text.json").write_bytes(msgspec.json.encode(TextConfig(kind="toy")))
    return tmp_path


def generate(replica: ReplicaOfRanks, *sets: int) -> dict[int, list[Sampled]]:
    return replica.generate(dict.fromkeys(sets or (0,), PROMPT), PAGES, chunk=16, num_tokens=6)


def tokens(answer: list[Sampled]) -> list[int]:
    return [sampled.token for sampled in answer]


def assert_same_answer(answer: list[Sampled], expected: list[Sampled]) -> None:
    """Tokens are equal, and the logprobs of the best few close."""
    assert tokens(answer) == tokens(expected)
    for one, other in zip(answer, expected, strict=True):
        assert one.logprobs is not None
        assert other.logprobs is not None
        assert dict(one.logprobs.top) == pytest.approx(dict(other.logprobs.top), abs=1e-3)


@pytest.mark.parametrize(("tp", "num_kv_heads"), [(2, 2), (3, 3), (4, 2), (1, 6), (3, 1)])
def test_toys_of_any_shape_give_one_text(tmp_path: Path, toy_dir: Path, tp: int, num_kv_heads: int) -> None:
    model = msgspec.structs.replace(TOY, num_kv_heads=num_kv_heads, mla=LATENT if num_kv_heads == 1 else None)
    (toy_dir / "config.json").write_bytes(msgspec.json.encode(model))
    with replica_of_ranks(toy_dir, tmp_path / "meet", tp) as replica:
        layout = replica.arenas[0].layout
        assert layout.num_kv_heads == max(num_kv_heads // tp, 1)
        assert tokens(generate(replica)[0]) == continuation(model, layout, PROMPT, 6)
        assert replica.counters[0].read() == 3 * (3 + 6)
        assert [wake.drain() for wake in replica.wakes] == [3 * (3 + 6)] * 2 * tp


def test_a_wrong_byte_on_any_rank_changes_the_toys_text(tmp_path: Path, toy_dir: Path) -> None:
    with replica_of_ranks(toy_dir, tmp_path / "meet", 4) as replica:  # each head twice
        generate(replica)
        again = [Row(SequenceId(len(PROMPT)), len(PROMPT) - 1, PROMPT[-1:], [], True)]
        right = replica.step(again, [])
        for arena in replica.arenas:
            at = arena.layout.offset_bytes(1, PAGES[2]) + 5
            arena.buffer()[at] ^= 1
            assert replica.step(again, []) != right
            arena.buffer()[at] ^= 1
            assert replica.step(again, []) == right


def heads(replica: ReplicaOfRanks, rank: int) -> npt.NDArray[np.float32]:
    """The rank's cache: [layers, pages, 2, kv_heads, page_tokens, head_dim]."""
    layout = replica.arenas[rank].layout
    words = replica.kv(rank).view(np.float32)
    return words.reshape(*words.shape[:2], 2, layout.num_kv_heads, layout.page_tokens, layout.head_dim)[:, PAGES]


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("qwen3", 3)])
def test_ranks_together_give_the_tokens_of_one(
    models: Callable[[str], PackedModel], tmp_path: Path, name: str, tp: int
) -> None:
    directory = models(name).dir
    with (
        replica_of_ranks(directory, tmp_path / "alone", 1) as alone,
        replica_of_ranks(directory, tmp_path / "meet", tp) as together,
    ):
        assert_same_answer(generate(together)[0], generate(alone)[0])
        assert_same_cache(together, alone)
        assert together.counters[0].read() == alone.counters[0].read() == 3 * (3 + 6)


def assert_same_cache(together: ReplicaOfRanks, alone: ReplicaOfRanks) -> None:
    whole = heads(alone, 0)
    for rank in range(together.tp):
        ours = heads_of(rank, together.tp, whole.shape[3])
        np.testing.assert_allclose(heads(together, rank), whole[:, :, :, ours.start : ours.stop], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "tp", "dp", "ep"),
    [
        ("qwen3-moe", 2, 1, 1),
        ("deepseek", 2, 1, 2),
        ("qwen3-moe", 1, 2, 2),
        ("deepseek", 1, 4, 4),
        ("deepseek", 2, 2, 4),
    ],
)
def test_experts_on_many_ranks_answer_as_on_one(
    models: Callable[[str], PackedModel],
    alone: Callable[[str], dict[int, list[Sampled]]],
    tmp_path: Path,
    name: str,
    tp: int,
    dp: int,
    ep: int,
) -> None:
    """Each set has a prompt of its own length: while one prefills another samples, and the first to be done waits."""
    prompts = dict(enumerate(PROMPTS[:dp]))
    with replica_of_ranks(models(name).dir, tmp_path / "meet", tp, dp=dp, ep=ep) as replica:
        answers = replica.generate({dp - 1: PROMPTS[0]}, PAGES, 16, 3)  # the other sets only take part
        assert tokens(answers[dp - 1]) == tokens(alone(name)[0][:3])
        before = [counter.read() for counter in replica.counters]
        answers = replica.generate(prompts, PAGES, 16, 8)
        for at, prompt in prompts.items():
            assert_same_answer(answers[at], alone(name)[at])
            num_steps = -(-(len(prompt) - 1) // 16) + 8
            assert replica.counters[at].read() - before[at] == 3 * num_steps


@pytest.fixture(scope="module")
def alone(
    models: Callable[[str], PackedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[int, list[Sampled]]]:
    """What one rank answers to PROMPTS."""
    made: dict[str, dict[int, list[Sampled]]] = {}

    def answers(name: str) -> dict[int, list[Sampled]]:
        if name not in made:
            with replica_of_ranks(models(name).dir, tmp_path_factory.mktemp("alone") / "meet", 1) as one:
                made[name] = {at: one.generate({0: prompt}, PAGES, 16, 8)[0] for at, prompt in enumerate(PROMPTS)}
        return made[name]

    return answers


class Memory:
    """Of one process, in bytes."""

    def __init__(self, pid: int, file: Path) -> None:
        mappings = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
        weights = "".join(one for one in mappings if str(file) in one)
        self.mapped = _total("Rss", weights)
        self.proportional = _total("Pss", weights)
        self.written = _total("Private_Dirty", weights) + _total("Anonymous", weights)
        self.own = _total("Anonymous", "".join(mappings))


def _total(field: str, smaps: str) -> int:
    return sum(int(kib) * 1024 for kib in re.findall(rf"^{field}: +(\d+) kB", smaps, flags=re.MULTILINE))


def test_ranks_of_a_node_share_the_weights(
    models: Callable[[str], PackedModel], tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """A tp 4 replica (two ranks to a KV head) and a dp 4 replica: eight ranks, one copy of the weights."""
    packed = models("qwen2")
    num_bytes = packed.weights.stat().st_size
    with (
        replica_of_ranks(models("llama").dir, tmp_path / "baseline", 1) as small,
        replica_of_ranks(packed.dir, tmp_path / "dp", 1, dp=4, kv_bytes=1 << 21) as dp,
        replica_of_ranks(packed.dir, tmp_path / "tp", 4, kv_bytes=1 << 20) as tp,
    ):
        generate(small)
        baseline = Memory(small.executors[0].process.pid, packed.weights)
        expected = generate(tp)[0]
        for answer in generate(dp, 0, 1, 2, 3).values():
            assert_same_answer(answer, expected)
        assert_same_cache(tp, dp)
        memories = [Memory(one.process.pid, packed.weights) for one in (*dp.executors, *tp.executors)]
        for name, part in (("dp 4", memories[:4]), ("tp 4", memories[4:])):
            shown = [(one.mapped >> 10, one.proportional >> 10, (one.own - baseline.own) >> 10) for one in part]
            record_property(name, shown)
            print(f"{name}: weights {num_bytes >> 10} KiB; (mapped, its share, own beyond a tiny model) KiB: {shown}")
        assert sum(one.proportional for one in memories) <= num_bytes + (1 << 20)
        assert sum(one.written for one in memories) == 0
        for one in memories[:4]:
            assert one.mapped > 0.9 * num_bytes
        for one in memories:
            assert one.own - baseline.own < num_bytes / 4


@pytest.mark.parametrize("kind", ["toy", "llama"])
def test_the_counter_waits_for_the_slowest_rank(
    models: Callable[[str], PackedModel], tmp_path: Path, toy_dir: Path, kind: str
) -> None:
    """What the lead's counter announces is in place on every rank, in a prefill and in a decode step."""
    gate_path = str(tmp_path / "gate")
    os.mkfifo(gate_path)
    gate = os.open(gate_path, os.O_RDWR)
    program = ("-c", GATED_STORE.format(gate=gate_path))
    directory = toy_dir if kind == "toy" else models("llama").dir
    with replica_of_ranks(directory, tmp_path / "meet", 2, programs={1: program}) as replica:
        counter, wake = replica.counters[0], replica.wakes[0]
        start = [StartSequence(SequenceId(1), PROMPT, [], PAGES, SamplingParams(max_tokens=1))]
        last = len(PROMPT) - 1
        for row, pages in (
            (Row(SequenceId(1), 0, PROMPT[:last], [], False), PAGES[:10]),
            (Row(SequenceId(1), last, PROMPT[last:], [], True), PAGES[10:11]),
        ):
            before, seen = counter.read(), []
            replica.send([row], start)
            start = []
            for layer in range(3):
                # A lead that does not wait has now the time to show it.
                assert select.select([wake.fd], [], [], 0.15)[0] == []
                assert counter.read() == before + layer
                os.write(gate, b"x")
                select.select([wake.fd], [], [], 60)
                wake.drain()
                assert counter.read() == before + layer + 1
                seen.append(replica.kv(1)[layer, pages])
            replica.receive()
            for layer, kv in enumerate(seen):
                assert kv.any(axis=1).all()
                np.testing.assert_array_equal(kv, replica.kv(1)[layer, pages])
    os.close(gate)


@pytest.mark.parametrize("kind", ["toy", "llama"])
@pytest.mark.parametrize("victim", [0, 1])
def test_when_a_rank_dies_the_others_say_so_and_end(
    models: Callable[[str], PackedModel], tmp_path: Path, toy_dir: Path, kind: str, victim: int
) -> None:
    directory = toy_dir if kind == "toy" else models("llama").dir
    with replica_of_ranks(directory, tmp_path / "meet", 2) as replica:
        generate(replica)
        other = replica.executors[1 - victim]
        replica.executors[victim].process.kill()
        replica.executors[victim].process.wait(60)
        start = [StartSequence(SequenceId(1), PROMPT, [], PAGES, SamplingParams(max_tokens=1))]
        other.send(Step(number=99, release=[], start=start, rows=[Row(SequenceId(1), 0, PROMPT, [], True)]))
        failure = other.failure()
        assert f"node/0 rank {1 - victim}: another rank of the replica died" in failure.message
        assert other.process.wait(60) == failure.exit_code == 1


@pytest.mark.parametrize(
    ("tp", "dp", "ep", "words"),
    [(4, 1, 1, "tp 4 and 6 KV heads: neither divides the other"), (1, 2, 3, "ep 3 must be 1 or dp * tp = 2")],
)
def test_an_impossible_shape_is_refused(toy_dir: Path, tp: int, dp: int, ep: int, words: str) -> None:
    (toy_dir / "config.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(TOY, num_kv_heads=6)))
    executor = Executor()
    executor.send(executor_config(toy_dir, toy_dir / "meet", tp=tp, dp=dp, ep=ep))
    failure = executor.failure()
    assert words in failure.message
    assert (failure.exit_code, executor.end()[0]) == (4, 4)
