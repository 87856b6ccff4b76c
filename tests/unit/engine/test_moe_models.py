"""Tiny random Qwen3-MoE and DeepSeek-V3 against Hugging Face's own code, however a prompt is cut and mixed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from single_rank import VOCAB_SIZE, Engine, check_mixed_batch, close, expected_logits, prompt_of, save

from pdd.engine.pack import PackedModel, pack
from pdd.engine.runner import BatchRow

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "initializer_range": 0.3,
    "bos_token_id": 0, "eos_token_id": 1, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
}  # fmt: skip
QWEN = SMALL | {"num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "norm_topk_prob": True}
DEEPSEEK = SMALL | {
    "num_key_value_heads": 6, "q_lora_rank": 28, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 16, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 128,
    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "qwen": QWEN | {"mlp_only_layers": [1]},
    "qwen-plain": QWEN | {"norm_topk_prob": False, "decoder_sparse_step": 2, "tie_word_embeddings": True},
    "deepseek": DEEPSEEK,
    "deepseek-yarn": DEEPSEEK | {"q_lora_rank": None, "rope_parameters": YARN, "n_group": 1, "topk_group": 1},
    "deepseek-other": DEEPSEEK
    | {
        "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}, "rope_interleave": False,
        "rms_norm_eps": 0.01, "attention_bias": True, "norm_topk_prob": False, "v_head_dim": 24, "n_shared_experts": 1,
    },
}  # fmt: skip


def build(kind: str) -> Any:
    if kind.startswith("qwen"):
        return transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**KINDS[kind]))
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**KINDS[kind]))


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(KINDS))
def oracle(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(7)
    model = build(request.param).eval().float()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms are ones and biases zeros: both would hide a mistake
            torch.nn.init.normal_(parameter, mean=1.0, std=0.3)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.3)
    return model


@pytest.fixture(scope="module")
def saved(oracle: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(oracle, tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def packed(saved: Path) -> PackedModel:
    return pack(saved, "float32", saved / "cache")


@pytest.mark.parametrize(("chunk_tokens", "page_tokens"), [(1, 16), (7, 32), (64, 16), (999, 32)])
def test_logits_do_not_depend_on_the_chunks(
    oracle: Any, packed: PackedModel, chunk_tokens: int, page_tokens: int
) -> None:
    engine, prompt = Engine(packed, page_tokens), prompt_of(150)
    close(engine.prefill(engine.sequence(prompt, 0), chunk_tokens), expected_logits(oracle, prompt))
    assert engine.counter.read() == 3 * -(-150 // chunk_tokens)
    engine.close()


def test_greedy_tokens_are_the_oracles(oracle: Any, packed: PackedModel) -> None:
    engine, prompt = Engine(packed), prompt_of(33)
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    assert engine.generate(prompt, 40) == expected[0, len(prompt) :].tolist()
    engine.close()


def test_a_mixed_batch_equals_separate_runs(oracle: Any, packed: PackedModel) -> None:
    check_mixed_batch(oracle, packed)


@pytest.mark.parametrize("oracle", ["deepseek", "deepseek-yarn"], indirect=True)
def test_a_prompt_longer_than_a_block_of_queries(oracle: Any, packed: PackedModel) -> None:
    prompt = prompt_of(600)
    engine = Engine(packed)
    sequence = engine.sequence(prompt, 0)
    engine.logits(BatchRow(sequence, 0, prompt[:5], False))
    logits = engine.logits(BatchRow(sequence, 5, prompt[5:], True))
    assert logits is not None
    close(logits[0], expected_logits(oracle, prompt))
    engine.close()


@pytest.mark.parametrize("oracle", ["qwen", "deepseek"], indirect=True)
def test_a_row_that_is_not_sampled_leaves_the_same_cache(oracle: Any, packed: PackedModel) -> None:
    """A prefiller skips what nobody needs, and the decoder cannot tell."""
    assert oracle.config.num_hidden_layers == 3
    caches = []
    for sample_it in (True, False):
        engine = Engine(packed)
        sequence = engine.sequence(prompt_of(50), 0)
        engine.logits(BatchRow(sequence, 0, sequence.prompt, sample_it))
        caches.append(bytes(engine.arena.buffer()))
        assert engine.counter.read() == 3
        engine.close()
    assert caches[0] == caches[1]


@pytest.mark.parametrize("oracle", ["deepseek"], indirect=True)
def test_the_cache_is_what_transformers_caches(oracle: Any, packed: PackedModel) -> None:
    """A row is the normed latent and the rotated key, of one head and one plane."""
    engine, prompt = Engine(packed), prompt_of(40)
    sequence = engine.sequence(prompt, 0)
    engine.prefill(sequence, 7)
    with torch.inference_mode():
        theirs = oracle(torch.tensor([prompt]), use_cache=True).cache
    rows = torch.frombuffer(bytearray(engine.arena.buffer()), dtype=torch.float32).view(3, 64, 16, 32)
    for layer in range(3):
        ours = rows[layer][sequence.pages.first(3).tolist()].flatten(0, 1)[:40]
        close(ours[:, :24], theirs.layers[layer].keys[0, 0])
        close(ours[:, 24:], theirs.layers[layer].values[0, 0])
    engine.close()


@pytest.mark.parametrize("oracle", ["qwen", "deepseek", "deepseek-yarn"], indirect=True)
def test_bfloat16_follows_float32(oracle: Any, saved: Path) -> None:
    """In direction, over many positions: rounding may send a token to another expert now and then."""
    engine = Engine(pack(saved, "bfloat16", saved / "cache"), num_pages=256)
    similar = []
    for seed in range(8):
        prompt = prompt_of(60, seed)
        actual = engine.prefill(engine.sequence(prompt, 0), 16)
        assert actual.dtype == torch.float32
        similar.append(torch.nn.functional.cosine_similarity(actual, expected_logits(oracle, prompt), dim=0))
    assert torch.stack(similar).median() > 0.97
    engine.close()


@pytest.mark.parametrize("oracle", ["qwen"], indirect=True)
def test_experts_are_mapped_not_copied(oracle: Any, packed: PackedModel) -> None:
    assert oracle is not None
    engine = Engine(packed)
    address = engine.model._layers[0].mlp._dispatch._experts._down[5].data_ptr()
    with open("/proc/self/maps") as maps:
        ranges = [line.split() for line in maps if line.rstrip().endswith(".safetensors")]
    bounds = [tuple(int(end, 16) for end in fields[0].split("-")) for fields in ranges if str(packed.dir) in fields[5]]
    assert any(low <= address < high for low, high in bounds)
    engine.close()
