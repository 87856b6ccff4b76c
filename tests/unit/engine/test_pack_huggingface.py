from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tiny_checkpoints import (
    FAMILIES,
    SIZES,
    byte_tokenizer,
    edit_json,
    packed_as_parameters,
    write_huggingface,
    write_json,
)
from tokenizers import Tokenizer, processors
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdd.base.errors import ModelInvalid
from pdd.engine.config import LinearScaling, Llama3Scaling, NoScaling, YarnScaling
from pdd.engine.pack import PackedModel, pack
from pdd.engine.weights.huggingface_config import read_config
from pdd.engine.weights.safetensors_file import bfloat16_bits

Damage = Callable[[Path], object]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_huggingface(directory, "llama")
    return directory


@pytest.fixture
def copy(llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama, tmp_path / "model"))


def check(packed: PackedModel, model: torch.nn.Module, dtype: torch.dtype) -> None:
    ours = packed_as_parameters(packed.weights, packed.config)
    theirs = model.state_dict()
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values.to(dtype)), name


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"head_dim": 16}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"head_dim": 16}),
        ("qwen3", {"head_dim": 16, "attention_bias": True}),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_tensors_are_the_models(tmp_path: Path, family: str, options: dict[str, Any], dtype: str) -> None:
    model = write_huggingface(tmp_path / "model", family, **options)
    check(pack(tmp_path / "model", dtype, tmp_path / "cache"), model, getattr(torch, dtype))


@pytest.mark.parametrize("stored", ["float16", "bfloat16"])
def test_stored_dtypes_and_shards(tmp_path: Path, stored: str) -> None:
    model = write_huggingface(tmp_path / "model", "llama", shard="20KB", dtype=stored)
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    check(pack(tmp_path / "model", "float32", tmp_path / "cache"), model, torch.float32)


@given(st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1))
def test_bfloat16_is_rounded_as_torch_does(values: list[float]) -> None:
    array = np.array(values, np.float32)
    expected = torch.from_numpy(array).to(torch.bfloat16).view(torch.uint16).numpy()
    assert np.array_equal(bfloat16_bits(array), expected)


def test_the_text_side(copy: Path, tmp_path: Path) -> None:
    edit_json(copy / "generation_config.json", eos_token_id=[257, 3], temperature=0.6, top_p=0.9, top_k=40)
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    added = {"content": "<s>", "__type": "AddedToken"}
    write_json(
        copy / "tokenizer_config.json",
        {"bos_token": added, "add_bos_token": True, "eos_token": "</s>", "chat_template": templates},
    )
    text = pack(copy, "float32", tmp_path / "cache").text
    assert (text.kind, text.bos_token_id, text.bos_token, text.add_bos) == ("tokenizer", 256, "<s>", True)
    assert (text.eos_token_ids, text.eos_token) == ((257, 3), "</s>")
    assert (text.temperature, text.top_p, text.top_k, text.repetition_penalty) == (0.6, 0.9, 40, None)
    assert text.chat_template == "plain"
    (copy / "chat_template.jinja").write_text("from its file")
    assert pack(copy, "float32", tmp_path / "cache").text.chat_template == "from its file"


def test_add_bos_follows_the_tokenizer_where_its_configuration_is_silent(copy: Path, tmp_path: Path) -> None:
    assert not pack(copy, "float32", tmp_path / "cache").text.add_bos
    tokenizer = byte_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 256)])
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(copy / "tokenizer.json"))
    packed = pack(copy, "float32", tmp_path / "cache")
    assert packed.text.add_bos
    assert len(Tokenizer.from_file(str(packed.tokenizer)).encode("a long prompt", add_special_tokens=False).ids) == 13


@pytest.mark.parametrize(
    ("changes", "base", "scaling", "max_position"),
    [
        ({"rope_theta": 7.0}, 7.0, NoScaling(), 128),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, 10000.0, LinearScaling(factor=2.0), 128),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, 5e5, NoScaling(), 128),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            5e5,
            Llama3Scaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192),
            128,
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
            10000.0,
            YarnScaling(
                factor=4.0,
                original_max_position=128,
                beta_fast=32.0,
                beta_slow=1.0,
                attention_factor=1.1386294361119891,
            ),
            512,
        ),
    ],
)
def test_rope_of_both_generations(
    tmp_path: Path, changes: dict[str, Any], base: float, scaling: Any, max_position: int
) -> None:
    write_json(tmp_path / "config.json", {"model_type": "llama"} | SIZES | changes)
    config = read_config(tmp_path / "config.json")
    assert (config.rope.base, config.rope.scaling, config.max_position) == (base, scaling, max_position)


@pytest.mark.parametrize("options", [{}, {"mscale": 0.7, "mscale_all_dim": 1.0}, {"attention_factor": 0.5}])
def test_yarn_attention_factor_is_that_of_transformers(tmp_path: Path, options: dict[str, float]) -> None:
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32} | options
    config_class, _ = FAMILIES["llama"]
    theirs = config_class(**SIZES, rope_parameters=dict(rope))
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    write_json(tmp_path / "config.json", {"model_type": "llama", "rope_parameters": rope} | SIZES)
    scaling = read_config(tmp_path / "config.json").rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert scaling.attention_factor == pytest.approx(expected)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"model_type": "gemma"}, "model_type is 'gemma'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no text generator"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        (
            {"model_type": "qwen2", "architectures": None, "use_sliding_window": True, "sliding_window": 64},
            "sliding_window",
        ),
        ({"model_type": "mistral", "architectures": None, "sliding_window": 64}, "sliding_window is 64"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "RoPE of type 'dynamic'"),
        ({"rope_parameters": {"rope_type": "linear"}}, "factor None"),
        ({"rope_parameters": {"rope_theta": 1e4, "mrope_section": [1]}}, "mrope_section"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"num_key_value_heads": 3}, "do not divide"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"hidden_size": "large"}, "hidden_size"),
        ({"vocab_size": 100}, "knows token 257, but the model's vocab_size is 100"),
        ({"vocab_size": 280}, r"has shape \[272, 32\]"),
        ({"eos_token_id": 999}, "special token id 999"),
        ({"num_hidden_layers": 3}, "missing, for example 'model.layers.2."),
        ({"num_hidden_layers": 1}, "no place in this kind of model, for example 'model.layers.1."),
        ({"attention_bias": True}, "missing, for example 'model.layers.0.self_attn.q_proj.bias'"),
    ],
)
def test_a_network_that_pdd_does_not_run_is_refused(
    copy: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    edit_json(copy / "config.json", **changes)
    with pytest.raises(ModelInvalid, match=words) as caught:
        pack(copy, "float32", tmp_path / "cache")
    assert str(copy) in str(caught.value)


def header_of(num_bytes: int) -> Damage:
    return lambda model: (model / "model.safetensors").write_bytes(num_bytes.to_bytes(8, "little") + b"{}" + b" " * 100)


def cut(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-100])


def pickled(model: Path) -> None:
    (model / "model.safetensors").rename(model / "pytorch_model.bin")


def panicking(model: Path) -> None:
    """A merge of which the library's own error message panics."""
    tokenizer = json.loads((model / "tokenizer.json").read_text())
    tokenizer["model"] |= {"merges": [["a", "b"]], "continuing_subword_prefix": "###"}
    write_json(model / "tokenizer.json", tokenizer)


def with_tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(model: Path) -> None:
        tensors = load_file(model / "model.safetensors")
        change(tensors)
        save_file(tensors, model / "model.safetensors")

    return damage


def poisoned(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][3] = float("nan")


def indexed(shard: str) -> Damage:
    def damage(model: Path) -> None:
        (model / "model.safetensors").unlink()
        write_json(model / "model.safetensors.index.json", {"weight_map": {"model.norm.weight": shard}})

    return damage


def entry(**changes: object) -> Damage:
    """A file of one tensor whose header lies."""

    def damage(model: Path) -> None:
        header = {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]} | changes}
        data = json.dumps(header).encode()
        (model / "model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data + bytes(16))

    return damage


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda model: (model / "config.json").unlink(), "config.json is missing"),
        (lambda model: (model / "config.json").write_text("not json"), "config.json: JSON is malformed"),
        (lambda model: (model / "config.json").write_bytes(b"\xff\xfe"), "config.json"),
        (lambda model: (model / "config.json").write_text("[]"), "config.json: Expected `object`"),
        (lambda model: (model / "tokenizer.json").unlink(), "tokenizer.json is missing"),
        (lambda model: (model / "tokenizer.json").write_text("{}"), "tokenizer.json: no readable tokenizer"),
        (panicking, "tokenizer.json: no readable tokenizer"),
        (lambda model: (model / "tokenizer_config.json").write_text("{"), "tokenizer_config.json"),
        (lambda model: (model / "chat_template.jinja").write_bytes(b"\xff"), "chat_template.jinja"),
        (lambda model: (model / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "header of 0 bytes"),
        (pickled, "pytorch_model.bin is a pickle"),
        (cut, "bytes of data are there"),
        (header_of(2**63), "does not fit a file"),
        (header_of(0), "header of 0 bytes"),
        (header_of(50), "'model.embed_tokens.weight'"),
        (header_of(1), "header of 1 bytes"),
        (entry(data_offsets=[0, 2**40]), "ends at byte 1099511627776"),
        (entry(data_offsets=[-4, 12]), "claims bytes -4 to 12"),
        (entry(shape=[5]), "holds 16 bytes"),
        (entry(shape=[2**62, 2**62]), "holds 16 bytes"),
        (entry(shape="four"), "Expected `array`"),
        (with_tensors(lambda tensors: tensors.pop("model.norm.weight")), "'model.norm.weight'"),
        (with_tensors(lambda tensors: tensors.update({"adapter": torch.zeros(1)})), "'adapter'"),
        (with_tensors(poisoned), "'model.norm.weight' holds a NaN"),
        (with_tensors(lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)})), r"shape \[31\]"),
        (with_tensors(lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)})), "stored as I8"),
        (indexed("absent.safetensors"), "'absent.safetensors', which is missing"),
        (indexed("../model.safetensors"), "outside its directory"),
    ],
)
def test_damage_is_named(copy: Path, tmp_path: Path, damage: Damage, words: str) -> None:
    damage(copy)
    with pytest.raises(ModelInvalid, match=words) as caught:
        pack(copy, "float32", tmp_path / "cache")
    assert str(copy) in str(caught.value)
    assert not list((tmp_path / "cache").rglob("weights-*"))
    assert not list((tmp_path / "cache").rglob(".*"))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_flipped_byte_of_the_header_never_crashes(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    original = (llama / "model.safetensors").read_bytes()
    position = data.draw(st.integers(0, 8 + int.from_bytes(original[:8], "little")))
    value = data.draw(st.integers(0, 255))
    model = Path(shutil.copytree(llama, tmp_path_factory.mktemp("flipped") / "model"))
    (model / "model.safetensors").write_bytes(original[:position] + bytes([value]) + original[position + 1 :])
    try:
        packed = pack(model, "float32", model / "cache")
    except ModelInvalid:
        return
    assert packed.weights.is_file()


def test_old_checkpoints_idle_tensors_are_left_out(copy: Path, tmp_path: Path) -> None:
    with_tensors(lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))(copy)
    packed = pack(copy, "float32", tmp_path / "cache")
    assert not any("inv_freq" in name for name in load_file(packed.weights))
