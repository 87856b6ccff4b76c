from __future__ import annotations

import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tiny_checkpoints import SIZES, GgufModel, packed_as_parameters
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pdd.base.errors import ModelInvalid
from pdd.engine.config import LinearScaling, Llama3Scaling, YarnScaling
from pdd.engine.pack import PackedModel, pack
from pdd.engine.weights.gguf_file import GgufFile


def packed(model: GgufModel, dtype: str = "float32") -> PackedModel:
    model.add_byte_vocabulary()
    return pack(model.save(), dtype, model.path.parent / "cache")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_tensors_are_those_of_the_hugging_face_form(tmp_path: Path, family: str, tied: bool) -> None:
    options = {"head_dim": 16} if family == "qwen3" else {}
    model = GgufModel(tmp_path / "m.gguf", family, tie_word_embeddings=tied, **options)
    result = packed(model)
    ours, theirs = packed_as_parameters(result.weights, result.config), model.model.state_dict()
    assert set(ours) == set(theirs)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name
    config = result.config
    assert (config.qkv_bias, config.qk_norm) == (family == "qwen2", family == "qwen3")
    assert (config.tied_embeddings, config.vocab_size, config.max_position) == (tied, 272, 128)


def test_biases_of_the_llama_architecture_are_permuted_too(tmp_path: Path) -> None:
    model = GgufModel(tmp_path / "m.gguf", "llama", attention_bias=True, mlp_bias=True)
    result = packed(model)
    ours = packed_as_parameters(result.weights, result.config)
    assert all(torch.equal(ours[name], values) for name, values in model.model.state_dict().items())


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1])
def test_quantised_types(tmp_path: Path, kind: Kind) -> None:
    model = GgufModel(tmp_path / "m.gguf", "qwen2", intermediate_size=64)
    model.kind = kind
    result = packed(model)
    matrices = load_file(result.weights)
    down = gguf.quants.dequantize(gguf.quants.quantize(model.tensors["blk.1.ffn_down.weight"], kind), kind)
    assert np.array_equal(matrices["layers.1.down"], down)
    assert np.abs(down - model.tensors["blk.1.ffn_down.weight"]).max() < 1
    gate, up = (
        gguf.quants.dequantize(gguf.quants.quantize(model.tensors[f"blk.0.ffn_{name}.weight"], kind), kind)
        for name in ("gate", "up")
    )
    assert np.array_equal(matrices["layers.0.gate_up"], np.concatenate([gate, up]))


def random_blocks(block_bytes: int, halves: tuple[int, ...], num_rows: int) -> np.ndarray:
    """Random bytes, except that the float16 numbers at the offsets `halves` are finite."""
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (num_rows, block_bytes), dtype=np.uint8)
    for offset in halves:
        scales = random.uniform(-1, 1, (num_rows, 1)).astype(np.float16)
        blocks[:, offset : offset + 2] = scales.view(np.uint8)
    return blocks


def half(block: bytes, offset: int) -> float:
    return float(struct.unpack_from("<e", block, offset)[0])


def q4_k(block: bytes) -> list[float]:
    """256 numbers in 144 bytes: d, dmin, eight 6-bit scales and minima in 12 bytes, 4 bits each."""
    scales, values = block[4:16], []
    for group in range(8):
        if group < 4:
            scale, minimum = scales[group] & 63, scales[group + 4] & 63
        else:
            scale = (scales[group + 4] & 15) | (scales[group - 4] >> 6 << 4)
            minimum = (scales[group + 4] >> 4) | (scales[group] >> 6 << 4)
        for index in range(32):
            byte = block[16 + group // 2 * 32 + index]
            bits = byte >> 4 if group % 2 else byte & 15
            values.append(half(block, 0) * scale * bits - half(block, 2) * minimum)
    return values


def q5_k(block: bytes) -> list[float]:
    """As q4_k, with a fifth bit of each number in 32 more bytes, one bit of each byte per group."""
    low = block[:16] + block[48:]
    unit = bytes([0, 0x3C, 0, 0]) + block[4:16]
    values = q4_k(low)
    for group in range(8):
        step = q4_k(unit + bytes([0xFF] * 128))[group * 32] / 15 * half(block, 0)
        for index in range(32):
            values[group * 32 + index] += 16 * step * (block[16 + index] >> group & 1)
    return values


def q6_k(block: bytes) -> list[float]:
    """256 numbers in 210 bytes: low 4 bits (128 bytes), high 2 bits (64), sixteen signed scales, d."""
    values = []
    for index in range(256):
        part, lane = divmod(index, 128)
        quarter, position = divmod(lane, 32)
        low = block[64 * part + 32 * (quarter % 2) + position] >> (4 * (quarter // 2)) & 15
        high = block[128 + 32 * part + position] >> (2 * quarter) & 3
        scale = struct.unpack_from("<b", block, 192 + index // 16)[0]
        values.append(half(block, 208) * scale * ((low | high << 4) - 32))
    return values


@pytest.mark.parametrize(
    ("kind", "block_bytes", "halves", "reference"),
    [(Kind.Q4_K, 144, (0, 2), q4_k), (Kind.Q5_K, 176, (0, 2), q5_k), (Kind.Q6_K, 210, (208,), q6_k)],
)
def test_k_quantised_types_follow_their_definition(
    tmp_path: Path, kind: Kind, block_bytes: int, halves: tuple[int, ...], reference: Callable[[bytes], list[float]]
) -> None:
    model = GgufModel(tmp_path / "m.gguf", "qwen2", intermediate_size=256)
    blocks = random_blocks(block_bytes, halves, 32)
    del model.tensors["blk.1.ffn_down.weight"]
    model.writer.add_tensor("blk.1.ffn_down.weight", blocks, raw_dtype=kind)
    ours = load_file(packed(model).weights)["layers.1.down"]
    expected = np.array([reference(row.tobytes()) for row in blocks])
    assert np.allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    model = GgufModel(tmp_path / "m.gguf", "qwen2", intermediate_size=256)
    model.writer.add_tensor("blk.1.ffn_down.weight", np.zeros((32, 110), np.uint8), raw_dtype=Kind.Q3_K)
    del model.tensors["blk.1.ffn_down.weight"]
    with pytest.raises(ModelInvalid, match=r"m.gguf: tensor 'blk.1.ffn_down.weight' is quantised as Q3_K"):
        packed(model)


def test_llama3_scaling_is_found_again(tmp_path: Path) -> None:
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(
        **SIZES | {"hidden_size": 512}, rope_parameters=rope | {"original_max_position_embeddings": 8192}
    )
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 5e5 ** (-np.arange(0, 128, 2) / 128)
    model = GgufModel(tmp_path / "m.gguf", "llama", hidden_size=512)
    model.writer.kv_data[0]["llama.rope.freq_base"].value = 5e5
    model.tensors["rope_freqs.weight"] = (plain / scaled.numpy()).astype(np.float32)
    expected = Llama3Scaling(factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=8192)
    scaling = packed(model).config.rope.scaling
    assert isinstance(scaling, Llama3Scaling)
    assert scaling.factor == pytest.approx(expected.factor)

    other = GgufModel(tmp_path / "other.gguf", "llama", hidden_size=512)
    other.tensors["rope_freqs.weight"] = np.linspace(1, 32, 64, dtype=np.float32)
    with pytest.raises(ModelInvalid, match="not Llama 3's"):
        packed(other)


def test_rope_scaling_from_metadata(tmp_path: Path) -> None:
    linear = GgufModel(tmp_path / "linear.gguf", "llama")
    linear.writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    linear.writer.add_rope_scaling_factor(2.0)
    assert packed(linear).config.rope.scaling == LinearScaling(factor=2.0)
    yarn = GgufModel(tmp_path / "yarn.gguf", "qwen2")
    yarn.writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    yarn.writer.add_rope_scaling_factor(4.0)
    yarn.writer.add_rope_scaling_orig_ctx_len(32)
    scaling = packed(yarn).config.rope.scaling
    assert isinstance(scaling, YarnScaling)
    assert (scaling.factor, scaling.original_max_position) == (4.0, 32)
    assert scaling.attention_factor == pytest.approx(1 + 0.1 * np.log(4))


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("split.count", 3, "llama-gguf-split --merge"),
        ("llama.expert_count", 8, "expert_count"),
        ("llama.attention.sliding_window", 64, "sliding_window is 64"),
        ("llama.rope.dimension_count", 4, "rope.dimension_count differs"),
        ("llama.attention.head_count_kv", 3, "do not divide"),
        ("llama.block_count", 3, "missing, for example 'blk.2."),
        ("llama.block_count", 1, "no place in this kind of model, for example 'blk.1."),
        ("llama.feed_forward_length", 47, r"shape \[48, 32\]"),
        ("llama.attention.head_count", 0, "num_heads"),
        ("llama.attention.key_length", 2**31, "rope.dimension_count|value_length|shape"),
        ("llama.block_count", 2**32 - 1, "damage"),
        ("llama.rope.freq_base", 0, "'llama.rope.freq_base' is '0'"),
        ("tokenizer.ggml.token_type", 1, "must be a list"),
        ("tokenizer.ggml.eos_token_id", 9999, "eos_token_id is 9999"),
    ],
)
def test_a_network_that_pdd_does_not_run_is_refused(tmp_path: Path, key: str, value: int, words: str) -> None:
    model = GgufModel(tmp_path / "m.gguf", "llama")
    model.writer.kv_data[0].pop(key, None)
    model.add_byte_vocabulary()
    model.writer.kv_data[0].pop(key, None)
    model.writer.add_uint32(key, value)
    with pytest.raises(ModelInvalid, match=words) as caught:
        pack(model.save(), "float32", tmp_path / "cache")
    assert str(model.path) in str(caught.value)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    gguf_path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(gguf_path, "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(ModelInvalid, match="architecture 'mamba'; pdd runs llama, qwen2, qwen3"):
        pack(gguf_path, "float32", tmp_path / "cache")


def header(*parts: bytes, version: int = 3, num_tensors: int = 0, num_keys: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + b"".join(parts)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def tensor(*shape: int, kind: int = 0, offset: int = 0) -> bytes:
    return text(b"x") + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty"),
        (b"GGML" + bytes(100), "does not begin with 'GGUF'"),
        (b"GGUF" + bytes(4), "its version is 0"),
        (header(version=4), "its version is 4"),
        (header(version=0x03000000), "little endian"),
        (header(num_keys=2**63), "announced"),
        (header(num_tensors=2**63), "announced"),
        (header(struct.pack("<Q", 2**62), num_keys=1), "4611686018427387904 bytes are announced"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 8, 2**60), num_keys=1), "announced"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 4, 2**60), num_keys=1), "announced"),
        (header(text(b"k"), struct.pack("<IIQ", 9, 9, 1), num_keys=1), "unknown kind 9"),
        (header(text(b"k"), struct.pack("<I", 99), num_keys=1), "unknown kind 99"),
        (header(text(b"\xff"), num_keys=1), "not UTF-8"),
        (header(text(b"x"), struct.pack("<I", 2**31), num_tensors=1), "2147483648 dimensions"),
        (header(tensor(4, kind=777), num_tensors=1), "unknown type 777"),
        (header(tensor(2**40), num_tensors=1), "ends at byte"),
        (header(tensor(4, offset=2**63), num_tensors=1), "ends at byte"),
        (header(tensor(0), num_tensors=1), "not made of whole F32 blocks"),
        (header(tensor(33, kind=8), num_tensors=1), "not made of whole Q8_0 blocks"),
        (header(text(b"general.alignment"), struct.pack("<II", 4, 0), num_keys=1), "alignment"),
        (header(), "'general.architecture' is missing"),
        (header(text(b"general.architecture"), struct.pack("<II", 4, 7), num_keys=1), "must be a str"),
    ],
)
def test_hostile_headers_are_named(tmp_path: Path, data: bytes, words: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelInvalid, match=words) as caught:
        pack(path, "float32", tmp_path / "cache")
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = GgufModel(tmp_path_factory.mktemp("whole") / "m.gguf", "llama")
    model.add_byte_vocabulary()
    return model.save()


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_damage_anywhere_never_crashes(whole: Path, data: st.DataObject) -> None:
    original = whole.read_bytes()
    position = data.draw(st.integers(0, 12_000))
    damaged = original[:position]
    if data.draw(st.booleans()):
        damaged += data.draw(st.binary(min_size=1, max_size=8))
        damaged += original[len(damaged) :]
    path = whole.with_name("damaged.gguf")
    path.write_bytes(damaged)
    with suppress(ModelInvalid):
        assert pack(path, "float32", whole.parent / "cache").weights.is_file()


def test_metadata_of_every_kind_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int16("i16", -3)
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_array("numbers", [1, -2])
    writer.add_array("words", ["a", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GgufFile(path)
    expected = {"u8": 200, "i16": -3, "f64": 0.1, "flag": True, "numbers": [1, -2], "words": ["a", "ü"]}
    assert {key: file.metadata[key] for key in expected} == expected
