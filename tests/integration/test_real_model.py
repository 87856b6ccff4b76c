"""SmolLM2-135M through real daemons, prefill and decode apart and together, against transformers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cluster import MakeCluster, colocated, prefill_and_decode
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from pdd.engine.pack import PackedModel, pack
from pdd.engine.weights.cache import default_cache

MODEL = default_cache() / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_TOKENS = 12

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} is absent: ./run fetches it"),
    pytest.mark.timeout(400),
]


def reference(packed: PackedModel) -> LlamaForCausalLM:
    """transformers' own Llama, filled with the packed weights taken apart again."""
    config = packed.config
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position,
            rms_norm_eps=config.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": config.rope.base},
            tie_word_embeddings=config.tied_embeddings,
        )
    )
    tensors = load_file(packed.weights)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    state = {"model.embed_tokens.weight": tensors["embed"], "model.norm.weight": tensors["final_norm"]}
    state["lm_head.weight"] = tensors["embed"]
    for layer in range(config.num_layers):
        ours, theirs = f"layers.{layer}", f"model.layers.{layer}"
        query, key, value = tensors[f"{ours}.qkv"].split([heads, kv_heads, kv_heads])
        gate, up = tensors[f"{ours}.gate_up"].chunk(2)
        state |= {
            f"{theirs}.self_attn.q_proj.weight": query,
            f"{theirs}.self_attn.k_proj.weight": key,
            f"{theirs}.self_attn.v_proj.weight": value,
            f"{theirs}.self_attn.o_proj.weight": tensors[f"{ours}.output"],
            f"{theirs}.mlp.gate_proj.weight": gate,
            f"{theirs}.mlp.up_proj.weight": up,
            f"{theirs}.mlp.down_proj.weight": tensors[f"{ours}.down"],
            f"{theirs}.input_layernorm.weight": tensors[f"{ours}.attention_norm"],
            f"{theirs}.post_attention_layernorm.weight": tensors[f"{ours}.mlp_norm"],
        }
    model.load_state_dict(state)
    return model.eval()


@pytest.fixture(scope="module")
def packed() -> PackedModel:
    return pack(MODEL, "float32", default_cache())


@pytest.fixture(scope="module")
def prompts(packed: PackedModel) -> list[list[int]]:
    text = re.sub(r"\s+", " ", Path(__file__).read_text())
    ids = Tokenizer.from_file(str(packed.tokenizer)).encode(text, add_special_tokens=False).ids
    return [ids[:33], ids[5:300], ids[:1100]]


@pytest.fixture(scope="module")
def expected(packed: PackedModel, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    """Greedy tokens and their logprobs."""
    model = reference(packed)
    answers = []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0, eos_token_id=None,
                return_dict_in_generate=True, output_logits=True,
            )  # fmt: skip
        tokens = output.sequences[0, len(prompt) :].tolist()
        logprobs = [
            torch.log_softmax(logits[0], dim=-1)[token].item()
            for logits, token in zip(output.logits, tokens, strict=True)
        ]
        answers.append((tokens, logprobs))
    return answers


@pytest.mark.parametrize("shape", ["colocated", "apart, chunk 64", "apart, chunk 2048"])
async def test_greedy_tokens_and_logprobs_are_those_of_transformers(
    make_cluster: MakeCluster,
    packed: PackedModel,
    prompts: list[list[int]],
    expected: list[tuple[list[int], list[float]]],
    shape: str,
) -> None:
    if shape == "colocated":
        nodes = colocated(kv_bytes="240 MiB")
    else:
        nodes = prefill_and_decode(kv_bytes="240 MiB", chunk_tokens=int(shape.rsplit(maxsplit=1)[-1]))
    handoff = {"local_prefill_tokens": 0}
    tokenizer = Tokenizer.from_file(str(packed.tokenizer))
    async with make_cluster(nodes, MODEL, default_cache(), handoff=handoff) as cluster:
        for prompt, (tokens, logprobs) in zip(prompts, expected, strict=True):
            answer = await cluster.complete(prompt, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=1)
            choice = answer["choices"][0]
            assert choice["text"] == tokenizer.decode(tokens, skip_special_tokens=True)
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=2e-3)
        if shape != "colocated":
            for story in (await cluster.ask("decode0", "story", answer["id"]))["stories"]:
                num_pages = -(-(len(prompts[-1]) - 1) // 16) - 2  # the first prompt left two full pages in the cache
                assert story["pieces"] == packed.config.num_layers * num_pages
                assert story["bytes"] == story["pieces"] * 24576
