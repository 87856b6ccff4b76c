from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_checkpoints import byte_tokenizer, edit_json, write_huggingface, write_json

from pdd.base.errors import ModelInvalid, OperatorError
from pdd.engine.pack import PackedModel, open_packed, pack
from pdd.engine.weights import huggingface, identity
from pdd.engine.weights.cache import default_cache

TOY = {
    "architectures": ["PddToyModel"],
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 300,
    "max_position_embeddings": 1000,
    "eos_token_id": 257,
    "toy_layer_seconds": 0.25,
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("original")
    write_huggingface(directory, "llama", shard="20KB")
    return directory


@pytest.fixture
def model(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


class Stages(list[tuple[str, float]]):
    def __call__(self, stage: str, fraction: float) -> None:
        self.append((stage, fraction))

    @property
    def names(self) -> set[str]:
        return {stage for stage, _ in self}


def test_progress_goes_up_to_the_end(model: Path, cache: Path) -> None:
    stages = Stages()
    pack(model, "float32", cache, stages)
    assert stages.names == {"identify", "convert"}
    for name in stages.names:
        fractions = [fraction for stage, fraction in stages if stage == name]
        assert fractions == sorted(fractions)
        assert fractions[-1] == 1.0


def test_a_second_call_reads_nothing(model: Path, cache: Path) -> None:
    first, stages = pack(model, "float32", cache), Stages()
    assert pack(model, "float32", cache, stages) == first
    assert not stages


def test_both_dtypes_share_a_directory(model: Path, cache: Path) -> None:
    wide, narrow = pack(model, "float32", cache), pack(model, "bfloat16", cache)
    assert (wide.dir, wide.digest) == (narrow.dir, narrow.digest)
    assert open_packed(wide.dir, "float32") == wide
    assert open_packed(wide.dir, "bfloat16") == narrow


def test_equal_files_have_one_digest_wherever_they_lie(model: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(model, tmp_path / "other"))
    os.utime(other / "config.json", ns=(1, 1))
    first, second = pack(model, "float32", tmp_path / "a"), pack(other, "float32", tmp_path / "b")
    assert first.digest == second.digest
    assert first.weights.read_bytes() == second.weights.read_bytes()
    edit_json(other / "config.json", max_position_embeddings=64)
    assert pack(other, "float32", tmp_path / "b").digest != first.digest


def test_a_changed_weight_is_another_model(model: Path, cache: Path) -> None:
    first = pack(model, "float32", cache)
    path = sorted(model.glob("*.safetensors"))[0]
    path.write_bytes(path.read_bytes()[:-4] + b"\x00\x00\x80\x3f")
    assert pack(model, "float32", cache).digest != first.digest


def test_large_files_are_sampled(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = huggingface.files(model)
    monkeypatch.setattr(identity, "WHOLE_BYTES", 4096)
    monkeypatch.setattr(identity, "_BLOCK_BYTES", 64)
    monkeypatch.setattr(identity, "_HEAD_BYTES", 256)
    before, fractions = identity.content_digest(paths, 1, lambda _: None), []
    shard = max(paths, key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert identity.content_digest(paths, 1, fractions.append) != before
    assert fractions == sorted(fractions)
    shard.write_bytes(data[:-4])
    assert identity.content_digest(paths, 1, lambda _: None) != before


PACKER = """
import sys
from pathlib import Path
from pdd.engine.pack import pack

said = set()

def progress(stage, fraction):
    if stage in ("convert", "wait") and stage not in said:
        said.add(stage)
        print(stage, flush=True)
        if stage == "convert":
            sys.stdin.readline()

print(pack(Path(sys.argv[1]), "float32", Path(sys.argv[2]), progress).digest)
"""


def test_of_two_processes_one_converts_and_the_other_waits(model: Path, cache: Path) -> None:
    def start() -> subprocess.Popen[str]:
        command = [sys.executable, "-c", PACKER, str(model), str(cache)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with start() as first, start_second(first, start) as second:
        assert second.stdout is not None
        assert second.stdout.readline() == "wait\n"
        ours, _ = first.communicate("\n")
        theirs, _ = second.communicate()
    assert ours == theirs
    assert ours.strip() == pack(model, "float32", cache).digest


def start_second(first: subprocess.Popen[str], start: Callable[[], subprocess.Popen[str]]) -> subprocess.Popen[str]:
    """Only when the first is in the middle."""
    assert first.stdout is not None
    assert first.stdout.readline() == "convert\n"
    return start()


def test_what_a_killed_writer_left_is_never_used(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = os.fork()
    if pid == 0:
        pack(
            model,
            "float32",
            cache,
            lambda stage, fraction: os._exit(9) if stage == "convert" and fraction > 0.5 else None,
        )
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9
    directory = next((cache / "packed").glob("*/"))
    assert list(directory.glob(".weights*"))
    with pytest.raises(ModelInvalid, match="weights-float32"):
        open_packed(directory, "float32")
    packed = pack(model, "float32", cache)
    assert not list(directory.glob(".*"))
    assert open_packed(packed.dir, "float32") == packed


def damage_of(packed: PackedModel, name: str, size: int | None) -> None:
    path = packed.dir / name
    if size is None:
        path.unlink()
    else:
        os.truncate(path, size)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("weights-float32.safetensors", 10_000),
        ("weights-float32.safetensors", 3),
        ("weights-float32.safetensors", None),
        ("config.json", 10),
        ("text.json", None),
        ("tokenizer.json", None),
    ],
)
def test_a_damaged_pack_is_told_and_made_again(model: Path, cache: Path, name: str, size: int | None) -> None:
    packed = pack(model, "float32", cache)
    whole = packed.weights.read_bytes()
    damage_of(packed, name, size)
    with pytest.raises(ModelInvalid, match=name):
        open_packed(packed.dir, "float32")
    assert pack(model, "float32", cache) == packed
    assert packed.weights.read_bytes() == whole


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_leaves_nothing(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def full(fd: int, offset: int, length: int) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OperatorError, match="make room there") as caught:
            pack(model, "float32", cache)
    assert str(cache) in str(caught.value)
    assert not list(cache.rglob(".*"))
    assert pack(model, "float32", cache).weights.is_file()


def test_a_cache_that_cannot_be_written_is_told(model: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(OperatorError, match="PDD_CACHE"):
        pack(model, "float32", tmp_path / "cache")


def test_files_that_change_meanwhile_are_not_packed(model: Path, cache: Path) -> None:
    def touch(stage: str, fraction: float) -> None:
        if stage == "convert":
            os.utime(model / "config.json", ns=(1, 1))

    with pytest.raises(ModelInvalid, match="changed while they were being packed"):
        pack(model, "float32", cache, touch)
    assert not list(cache.rglob("*weights*"))
    assert pack(model, "float32", cache).weights.is_file()


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_the_toy_has_no_weights(tmp_path: Path, cache: Path, with_tokenizer: bool) -> None:
    toy = tmp_path / "toy"
    toy.mkdir()
    write_json(toy / "config.json", TOY)
    if with_tokenizer:
        byte_tokenizer().save(str(toy / "tokenizer.json"))
    packed = pack(toy, "float32", cache)
    config = packed.config
    assert (config.architecture, config.num_layers, config.num_kv_heads, config.head_dim) == ("toy", 4, 2, 8)
    assert (config.vocab_size, config.max_position, config.toy_layer_seconds) == (300, 1000, 0.25)
    assert packed.text.kind == ("tokenizer" if with_tokenizer else "toy")
    assert packed.text.eos_token_ids == (257,)
    assert not packed.weights.exists()
    assert pack(toy, "bfloat16", cache).digest == packed.digest


def test_a_path_that_is_nothing_is_told(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ModelInvalid, match="nowhere does not exist"):
        pack(tmp_path / "nowhere", "float32", cache)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelInvalid, match=r"to run its GGUF file, name it: .*model.gguf"):
        pack(tmp_path, "float32", cache)


def test_an_unknown_dtype_is_told(model: Path, cache: Path) -> None:
    with pytest.raises(ModelInvalid, match="dtype 'int8'"):
        pack(model, "int8", cache)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PDD_CACHE", str(tmp_path))
    assert default_cache() == tmp_path
    monkeypatch.delenv("PDD_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache() == tmp_path / ".cache" / "pdd"
