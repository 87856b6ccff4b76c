"""Tiny random Llama, Qwen2 and Qwen3 against Hugging Face's own code, however a prompt is cut and mixed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from single_rank import GREEDY, VOCAB_SIZE, Engine, check_mixed_batch, close, expected_logits, prompt_of, save

from pdd.base.errors import ModelInvalid, ReplicaFailed
from pdd.base.ids import SequenceId
from pdd.engine.attention import BatchPlan
from pdd.engine.pack import PackedModel, pack
from pdd.engine.protocol import StartSequence
from pdd.engine.runner import BatchRow, SequenceState
from pdd.engine.sampler import sample

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
ROPES: dict[str, Any] = {
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 128,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512},
}  # fmt: skip
KINDS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)),
    "llama-bias": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, head_dim=20)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SMALL)),
    "qwen3": lambda: transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=16)),
    **{
        name: lambda rope=rope: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, rope_parameters=rope))
        for name, rope in ROPES.items()
    },
}


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(KINDS))
def oracle(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(7)
    model = KINDS[request.param]().eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are ones and biases zeros: both would hide a mistake
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    return model


@pytest.fixture(scope="module")
def saved(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packed(saved: Path) -> PackedModel:
    return pack(saved, "float32", saved / "cache")


@pytest.fixture
def engine(packed: PackedModel) -> Iterator[Engine]:
    engine = Engine(packed)
    yield engine
    engine.close()


@pytest.mark.parametrize("chunk_tokens", [1, 7, 64, 999])
def test_logits_do_not_depend_on_the_chunks(oracle: Any, engine: Engine, chunk_tokens: int) -> None:
    prompt = prompt_of(150)
    close(engine.prefill(engine.sequence(prompt, 0), chunk_tokens), expected_logits(oracle, prompt))
    assert engine.counter.read() == 3 * -(-150 // chunk_tokens)


def test_greedy_tokens_are_the_oracles(oracle: Any, engine: Engine) -> None:
    prompt = prompt_of(33)
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
    assert engine.generate(prompt, 24) == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("oracle", ["llama", "qwen3"], indirect=True)
def test_a_mixed_batch_equals_separate_runs(oracle: Any, packed: PackedModel) -> None:
    check_mixed_batch(oracle, packed)


@pytest.mark.parametrize("oracle", ["llama", "llama3"], indirect=True)
def test_a_prompt_longer_than_a_block_of_queries(oracle: Any, packed: PackedModel) -> None:
    prompt = prompt_of(900)
    engine = Engine(packed)
    sequence = engine.sequence(prompt, 0)
    engine.logits(BatchRow(sequence, 0, prompt[:5], False))
    close(engine.logits(BatchRow(sequence, 5, prompt[5:], True))[0], expected_logits(oracle, prompt))
    engine.close()


@pytest.mark.parametrize("oracle", ["qwen2"], indirect=True)
def test_a_row_that_is_not_sampled_leaves_the_same_kv(oracle: Any, packed: PackedModel) -> None:
    """A prefiller skips what nobody needs, and the decoder cannot tell."""
    assert oracle.config.model_type == "qwen2"
    caches = []
    for sample_it in (True, False):
        engine = Engine(packed)
        sequence = engine.sequence(prompt_of(50), 0)
        engine.logits(BatchRow(sequence, 0, sequence.prompt, sample_it))
        caches.append(bytes(engine.arena.buffer()))
        assert engine.counter.read() == engine.wake.drain() == 3
        engine.close()
    assert caches[0] == caches[1]


@pytest.mark.parametrize("oracle", ["llama", "qwen3"], indirect=True)
def test_bfloat16_follows_float32(oracle: Any, saved: Path) -> None:
    engine = Engine(pack(saved, "bfloat16", saved / "cache"))
    prompt = prompt_of(60)
    expected = expected_logits(oracle, prompt)
    for chunk_tokens in (16, 60):
        actual = engine.prefill(engine.sequence(prompt, 0), chunk_tokens)
        assert actual.dtype == torch.float32
        assert torch.nn.functional.cosine_similarity(actual, expected, dim=0) > 0.99
    engine.close()


@pytest.mark.parametrize("oracle", ["llama"], indirect=True)
def test_weights_are_mapped_not_copied(oracle: Any, packed: PackedModel) -> None:
    assert oracle is not None
    engine = Engine(packed)
    address = engine.model._layers[1].mlp._down.weights[0].data_ptr()
    with open("/proc/self/maps") as maps:
        ranges = [line.split() for line in maps if line.rstrip().endswith(".safetensors")]
    bounds = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in ranges if str(packed.dir) in fields[5]]
    assert any(low <= address < high for low, high in bounds)
    engine.close()


@pytest.mark.parametrize("oracle", ["llama"], indirect=True)
def test_damaged_weights_are_told(oracle: Any, packed: PackedModel, tmp_path: Path) -> None:
    engine = Engine(packed)
    sequence = engine.sequence(prompt_of(8), 0)
    engine.arena.buffer()[:] = b"\xff" * engine.layout.arena_bytes  # float32 NaN
    with pytest.raises(ReplicaFailed, match=rf"sequence {sequence.id}.*not finite"):
        engine.model.forward([BatchRow(sequence, 7, [5], True)])
    engine.close()
    assert oracle.config.model_type == "llama"
    broken = PackedModel(tmp_path, packed.config, packed.text, "x", "float32")
    (tmp_path / "weights-float32.safetensors").write_bytes(os.urandom(100))
    with pytest.raises(ModelInvalid, match="pack the model again"):
        Engine(broken)


def test_sampling_needs_logits_of_this_batch_only() -> None:
    """The sampler sees rows in the plan's order, not the step's."""
    prompts = [[1, 2, 3, 4, 5], [6]]
    rows = [
        BatchRow(SequenceState(StartSequence(SequenceId(at), prompt, [], [at], GREEDY)), 0, prompt, True)
        for at, prompt in enumerate(prompts)
    ]
    plan = BatchPlan(rows, 8)
    assert [row.sequence.id for row in plan.sampled_rows] == [1, 0]
    logits = torch.eye(2, 10).numpy()
    assert [(one.sequence, one.token) for one in sample(logits, plan.sampled_rows)] == [(1, 0), (0, 1)]
