"""Tiny random models in the forms that pdd packs, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB_SIZE = 272
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 256,
    "eos_token_id": 257,
}
FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}
FAMILY_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
    },
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 20, "kv_lora_rank": 24, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
        "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 20,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1,
    },
}  # fmt: skip


def byte_tokenizer() -> Tokenizer:
    """256 bytes, then `<s>` and `</s>`."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    return tokenizer


def write_huggingface(
    directory: Path, family: str, *, shard: str = "1GB", dtype: str = "float32", **options: Any
) -> PreTrainedModel:
    """A saved model of `family` whose every parameter is random, with its tokenizer."""
    config_class, model_class = FAMILIES[family]
    torch.manual_seed(0)
    if family == "mistral":
        options.setdefault("sliding_window", None)
    model = model_class(config_class(**(SIZES | FAMILY_SIZES.get(family, {}) | options)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()
    model = model.to(getattr(torch, dtype))
    model.save_pretrained(directory, max_shard_size=shard)
    byte_tokenizer().save(str(directory / "tokenizer.json"))
    write_json(directory / "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    return model


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


def edit_json(path: Path, **changes: object) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


def packed_as_parameters(weights: Path, config: Any) -> dict[str, torch.Tensor]:
    """The pack's tensors, cut up and named again as transformers names parameters."""
    packed = load_file(weights)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    parameters = {"model.embed_tokens.weight": packed["embed"], "model.norm.weight": packed["final_norm"]}
    parameters["lm_head.weight"] = packed.get("head", packed["embed"])
    whole = {
        "attention_norm": "input_layernorm.weight",
        "q_norm": "self_attn.q_norm.weight",
        "k_norm": "self_attn.k_norm.weight",
        "output": "self_attn.o_proj.weight",
        "output_bias": "self_attn.o_proj.bias",
        "mlp_norm": "post_attention_layernorm.weight",
        "down": "mlp.down_proj.weight",
        "down_bias": "mlp.down_proj.bias",
    }
    for name, tensor in packed.items():
        if not name.startswith("layers."):
            continue
        _, layer, word = name.split(".")
        prefix = f"model.layers.{layer}"
        suffix = "bias" if word.endswith("_bias") else "weight"
        if word in whole:
            parameters[f"{prefix}.{whole[word]}"] = tensor
        elif word.startswith("qkv"):
            for part, rows in zip("qkv", tensor.split([queries, keys, keys]), strict=True):
                parameters[f"{prefix}.self_attn.{part}_proj.{suffix}"] = rows
        else:
            for part, rows in zip(("gate", "up"), tensor.chunk(2), strict=True):
                parameters[f"{prefix}.mlp.{part}_proj.{suffix}"] = rows
    return parameters


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """A q or k in GGUF's order of the llama architecture: head row `half * d/2 + pair` goes to `2 * pair + half`."""
    result = np.empty_like(rows)
    head_dim = len(rows) // num_heads
    for head in range(num_heads):
        for half in range(2):
            for pair in range(head_dim // 2):
                source = head * head_dim + half * (head_dim // 2) + pair
                result[head * head_dim + 2 * pair + half] = rows[source]
    return result


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(parameter: str) -> str:
    name, suffix = parameter.rsplit(".", 1)
    if name.startswith("model.layers."):
        _, _, layer, rest = name.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"
    return f"{GGUF_NAMES[name]}.{suffix}"


class GgufModel:
    """A GGUF file in the making; change `writer`, `tensors` or `kind`, then `save`."""

    def __init__(self, path: Path, family: str, **options: Any) -> None:
        config_class, model_class = FAMILIES[family]
        torch.manual_seed(0)
        sizes = SIZES | options
        self.config = config_class(**sizes)
        self.model = model_class(self.config)
        self.path, self.kind = path, gguf.GGMLQuantizationType.F32
        self.tensors: dict[str, np.ndarray] = {}
        for name, parameter in self.model.state_dict().items():
            if name == "lm_head.weight" and self.config.tie_word_embeddings:
                continue
            values = parameter.normal_().numpy()
            if family == "llama" and ".q_proj." in name:
                values = interleave(values, sizes["num_attention_heads"])
            if family == "llama" and ".k_proj." in name:
                values = interleave(values, sizes["num_key_value_heads"])
            self.tensors[gguf_name(name)] = values
        self.writer = gguf.GGUFWriter(path, family)
        self._describe(family, sizes)

    def _describe(self, family: str, sizes: dict[str, Any]) -> None:
        writer = self.writer
        writer.add_block_count(sizes["num_hidden_layers"])
        writer.add_context_length(sizes["max_position_embeddings"])
        writer.add_embedding_length(sizes["hidden_size"])
        writer.add_feed_forward_length(sizes["intermediate_size"])
        writer.add_head_count(sizes["num_attention_heads"])
        writer.add_head_count_kv(sizes["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(1e-6)
        writer.add_rope_freq_base(10000.0)
        if family == "qwen3":
            writer.add_key_length(self.config.head_dim)
            writer.add_value_length(self.config.head_dim)

    def add_byte_vocabulary(self) -> None:
        """One merge, because GGUF cannot say of an empty list what it is a list of."""
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokens, types = [*alphabet, "<s>", "</s>", "th"], [1] * 256 + [3, 3, 1]
        self.writer.add_tokenizer_pre("gpt-2")
        self.add_vocabulary("gpt2", tokens, types, merges=["t h"])

    def add_vocabulary(
        self,
        model: str,
        tokens: list[str],
        types: list[int],
        *,
        merges: list[str] | None = None,
        scores: list[float] | None = None,
    ) -> None:
        self.writer.add_tokenizer_model(model)
        self.writer.add_token_list(tokens)
        self.writer.add_token_types(types)
        if merges is not None:
            self.writer.add_token_merges(merges)
        if scores is not None:
            self.writer.add_token_scores(scores)
        for name, token in (("bos", "<s>"), ("eos", "</s>")):
            if token in tokens:
                self.writer.add_uint32(f"tokenizer.ggml.{name}_token_id", tokens.index(token))

    def save(self) -> Path:
        """Matrices are stored as `kind`, vectors as float32."""
        for name, values in self.tensors.items():
            kind = self.kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
            self.writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path
