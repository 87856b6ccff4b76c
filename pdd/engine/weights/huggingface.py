"""A Hugging Face directory as a source: safetensors weights of the kinds in huggingface_config.py.

Nothing is unpickled, no code of the directory is run. How configurations are read is in huggingface_config.py, how
tokens and templates are in huggingface_text.py.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig
from pdd.engine.weights import huggingface_layout, huggingface_text, safetensors_file
from pdd.engine.weights.huggingface_config import read_config
from pdd.engine.weights.json_file import read_json
from pdd.engine.weights.source import Source, StoredTensor, bind

_NAMES = {
    "embed": "model.embed_tokens.weight",
    "attention_norm": "model.layers.{}.input_layernorm.weight",
    "q": "model.layers.{}.self_attn.q_proj.weight",
    "k": "model.layers.{}.self_attn.k_proj.weight",
    "v": "model.layers.{}.self_attn.v_proj.weight",
    "q_bias": "model.layers.{}.self_attn.q_proj.bias",
    "k_bias": "model.layers.{}.self_attn.k_proj.bias",
    "v_bias": "model.layers.{}.self_attn.v_proj.bias",
    "q_norm": "model.layers.{}.self_attn.q_norm.weight",
    "k_norm": "model.layers.{}.self_attn.k_norm.weight",
    "output": "model.layers.{}.self_attn.o_proj.weight",
    "output_bias": "model.layers.{}.self_attn.o_proj.bias",
    "mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
    "gate": "model.layers.{}.mlp.gate_proj.weight",
    "up": "model.layers.{}.mlp.up_proj.weight",
    "gate_bias": "model.layers.{}.mlp.gate_proj.bias",
    "up_bias": "model.layers.{}.mlp.up_proj.bias",
    "down": "model.layers.{}.mlp.down_proj.weight",
    "down_bias": "model.layers.{}.mlp.down_proj.bias",
    "q_a": "model.layers.{}.self_attn.q_a_proj.weight",
    "q_a_bias": "model.layers.{}.self_attn.q_a_proj.bias",
    "q_a_norm": "model.layers.{}.self_attn.q_a_layernorm.weight",
    "q_b": "model.layers.{}.self_attn.q_b_proj.weight",
    "kv_a": "model.layers.{}.self_attn.kv_a_proj_with_mqa.weight",
    "kv_a_bias": "model.layers.{}.self_attn.kv_a_proj_with_mqa.bias",
    "kv_a_norm": "model.layers.{}.self_attn.kv_a_layernorm.weight",
    "k_up": f"model.layers.{{}}.{huggingface_layout.K_UP}",
    "v_up": f"model.layers.{{}}.{huggingface_layout.V_UP}",
    "router": "model.layers.{}.mlp.gate.weight",
    "router_bias": "model.layers.{}.mlp.gate.e_score_correction_bias",
    "expert_gate": "model.layers.{}.mlp.experts.{}.gate_proj.weight",
    "expert_up": "model.layers.{}.mlp.experts.{}.up_proj.weight",
    "expert_down": "model.layers.{}.mlp.experts.{}.down_proj.weight",
    "shared_gate": "model.layers.{}.mlp.shared_experts.gate_proj.weight",
    "shared_up": "model.layers.{}.mlp.shared_experts.up_proj.weight",
    "shared_down": "model.layers.{}.mlp.shared_experts.down_proj.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def files(directory: Path) -> list[Path]:
    """Every file that says what the model is. Raises ModelInvalid where `config.json` or a shard is missing."""
    config = directory / _CONFIG
    if not config.is_file():
        raise ModelInvalid(f"{config} is missing: {directory} is no Hugging Face model directory{_ggufs(directory)}")
    texts = [directory / name for name in (*huggingface_text.FILES, _INDEX)]
    return [config, *(path for path in texts if path.is_file()), *_weight_files(directory)]


def open_huggingface(directory: Path) -> Source:
    """Raises ModelInvalid for anything that is missing, damaged, or of a kind that pdd does not run."""
    config = read_config(directory / _CONFIG)
    tokenizer = huggingface_text.read_tokenizer(directory, config)
    text = huggingface_text.read_text(directory, config, tokenizer)
    if config.architecture == "toy":
        return Source(directory, config, text, tokenizer.to_str().encode() if tokenizer else None)
    if tokenizer is None:
        raise ModelInvalid(
            f"{directory / 'tokenizer.json'} is missing: fetch it, or, where the model comes with another tokenizer "
            f"file only, write it with transformers: AutoTokenizer.from_pretrained(...).save_pretrained(...)"
        )
    pieces = bind(directory, config, _NAMES, *_weights(directory, config))
    return Source(directory, config, text, tokenizer.to_str().encode(), pieces)


def _weights(directory: Path, config: ModelConfig) -> tuple[dict[str, StoredTensor], frozenset[str]]:
    """The stored tensors, and the names among them that may lie idle: old checkpoints hold RoPE's frequencies, and some
    hold a head that is a copy of the embedding."""
    paths = _weight_files(directory)
    if not paths:
        pickles = sorted(path.name for suffix in ("*.bin", "*.pt", "*.pth") for path in directory.glob(suffix))
        advice = f" ({pickles[0]} is a pickle, which pdd does not open)" if pickles else ""
        raise ModelInvalid(
            f"{directory}: neither {_WEIGHTS} nor {_INDEX} is there{advice}: fetch the safetensors files, or write "
            f"them with transformers: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
        )
    stored: dict[str, StoredTensor] = {}
    for path in paths:
        stored.update(safetensors_file.stored_tensors(path))
    stored = huggingface_layout.arranged(directory / _CONFIG, config, stored)
    idle = {name for name in stored if name.endswith(".rotary_emb.inv_freq")}
    return stored, frozenset(idle | ({_NAMES["head"]} if config.tied_embeddings else set()))


def _weight_files(directory: Path) -> list[Path]:
    if (directory / _WEIGHTS).is_file():
        return [directory / _WEIGHTS]
    index = directory / _INDEX
    if not index.is_file():
        return []
    shards = sorted(set(read_json(index, _Index).weight_map.values()))
    for shard in shards:
        if Path(shard).name != shard:
            raise ModelInvalid(f"{index} names the shard {shard!r} outside its directory; fetch the model again")
        if not (directory / shard).is_file():
            raise ModelInvalid(f"{index} names the shard {shard!r}, which is missing; fetch the model again")
    return [directory / shard for shard in shards]


def _ggufs(directory: Path) -> str:
    ggufs = sorted(path.name for path in directory.glob("*.gguf"))
    return f"; to run its GGUF file, name it: {directory / ggufs[0]}" if ggufs else ""
