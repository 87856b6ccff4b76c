"""A model's files, converted once into a directory that every process of the machine maps and shares.

Before a daemon starts its executors it calls `pack`, which is quick where the pack exists; executors open the result.

    $PDD_CACHE/packed/<digest>/config.json                  ModelConfig
                               text.json                    TextConfig
                               tokenizer.json               for Hugging Face's tokenizers
                               weights-<dtype>.safetensors  the tensors of weights/tensors.py; the toy has none
    $PDD_CACHE/packed/<digest>.lock
    $PDD_CACHE/sources/*.json                               digests of sources that were seen

Every file appears by a rename when it is whole and on the disk, the weights (and the toy's text.json) last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np

from pdd.base.errors import ModelInvalid
from pdd.engine.config import Dtype, ModelConfig, TextConfig
from pdd.engine.weights import huggingface, identity, safetensors_file
from pdd.engine.weights.cache import explained, locked, remove_leftovers, replace_file, replacing
from pdd.engine.weights.gguf import open_gguf
from pdd.engine.weights.json_file import read_json
from pdd.engine.weights.source import Floats, Source, StoredTensor
from pdd.engine.weights.tensors import PackedTensor, packed_tensors

FORMAT_VERSION = 2
"""Part of the digest: raise it whenever the same source would be packed into other bytes."""
_AGAIN = "pack the model again"
_BLOCK_ITEMS = 1 << 20
"""How many numbers are converted at a time: stays in the processor's cache, and bounds memory for any model."""
_DTYPES: dict[str, Dtype] = {dtype: dtype for dtype in get_args(Dtype)}

Progress = Callable[[str, float], None]
"""Called with what is being done ("identify", "wait", "convert") and the fraction of it that is done, 0 to 1."""


@dataclass(frozen=True)
class PackedModel:
    dir: Path
    config: ModelConfig
    text: TextConfig
    digest: str
    """Equal on all machines that packed the same files; independent of the dtype."""
    dtype: Dtype

    @property
    def weights(self) -> Path:
        """Of the toy, a path where nothing is."""
        return self.dir / f"weights-{self.dtype}.safetensors"

    @property
    def tokenizer(self) -> Path:
        return self.dir / "tokenizer.json"


def pack(path: Path, dtype: str, cache: Path, progress: Progress | None = None) -> PackedModel:
    """The pack of a Hugging Face directory, GGUF file or toy directory, made now where there is none yet.

    Safe to call from several processes at once: one converts, the others wait for it. Raises ModelInvalid where the
    model cannot be run, OperatorError where the cache cannot be written.
    """
    path, kind = path.expanduser().absolute(), _dtype(dtype)
    report = _silent if progress is None else progress
    paths = _files(path)
    with explained(cache):
        digest, seen = _identify(path, paths, cache, report)
        directory = cache / "packed" / digest
        try:
            return open_packed(directory, kind)
        except ModelInvalid:
            directory.mkdir(parents=True, exist_ok=True)
        with locked(directory.with_suffix(".lock"), lambda: report("wait", 0.0)):
            try:
                return open_packed(directory, kind)
            except ModelInvalid:
                remove_leftovers(directory)
            _write(directory, _open(path), kind, lambda: identity.stamps(paths) == seen, report)
    return open_packed(directory, kind)


def open_packed(directory: Path, dtype: str) -> PackedModel:
    """Raises ModelInvalid where `directory` holds no whole pack with weights of `dtype`."""
    kind = _dtype(dtype)
    config = read_json(directory / "config.json", ModelConfig, _AGAIN)
    text = read_json(directory / "text.json", TextConfig, _AGAIN)
    packed = PackedModel(directory, config, text, directory.name, kind)
    if text.kind == "tokenizer" and not packed.tokenizer.is_file():
        raise ModelInvalid(f"{packed.tokenizer} is missing; {_AGAIN}")
    tensors = packed_tensors(config)
    if tensors:
        entries = safetensors_file.read_header(packed.weights).tensors
        if {name: entry.shape for name, entry in entries.items()} != {each.name: each.shape for each in tensors}:
            raise ModelInvalid(f"{packed.weights} does not hold the tensors of config.json; {_AGAIN}")
    return packed


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        return huggingface.files(path)
    if path.is_file():
        return [path]
    raise ModelInvalid(f"{path} does not exist; name a Hugging Face model directory or a GGUF file")


def _open(path: Path) -> Source:
    return huggingface.open_huggingface(path) if path.is_dir() else open_gguf(path)


def _identify(path: Path, paths: list[Path], cache: Path, report: Progress) -> tuple[str, tuple[identity.Stamp, ...]]:
    """The source's digest, and what its files looked like before they were read."""
    try:
        seen = identity.stamps(paths)
        known = identity.known_digest(path, seen, FORMAT_VERSION, cache)
        if known is not None:
            return known, seen
        digest = identity.content_digest(paths, FORMAT_VERSION, lambda fraction: report("identify", fraction))
    except OSError as error:
        raise ModelInvalid(f"{error.filename or path}: {error.strerror or error}") from error
    identity.remember_digest(path, seen, FORMAT_VERSION, cache, digest)
    return digest, seen


def _write(directory: Path, source: Source, dtype: Dtype, unchanged: Callable[[], bool], report: Progress) -> None:
    """Convert everything, then check that the source is still what the digest was taken of."""
    if source.tokenizer_json is not None:
        replace_file(directory / "tokenizer.json", source.tokenizer_json)
    replace_file(directory / "config.json", msgspec.json.encode(source.config))
    replace_file(directory / "text.json", msgspec.json.encode(source.text))
    tensors = packed_tensors(source.config)
    if not tensors:
        return
    with replacing(directory / f"weights-{dtype}.safetensors") as temporary:
        safetensors_file.write(temporary, dtype, tensors, _Reader(source, tensors, report).blocks)
        if not unchanged():
            raise ModelInvalid(f"{source.path}: the files changed while they were being packed; start again")


class _Reader:
    """Reads a source tensor by tensor and tells how far it is."""

    def __init__(self, source: Source, tensors: list[PackedTensor], report: Progress) -> None:
        self._source = source
        self._report = report
        self._num_items = sum(math.prod(tensor.shape) for tensor in tensors)
        self._num_done = 0

    def blocks(self, tensor: PackedTensor) -> Iterator[Floats]:
        """The numbers of a packed tensor, in order."""
        for piece in tensor.pieces:
            stored = self._source.pieces[piece.name]
            for block in _row_blocks(stored):
                if not np.isfinite(block).all():
                    raise ModelInvalid(
                        f"{stored.where} holds a NaN or an infinity: the file is damaged; fetch it again"
                    )
                yield block
                self._num_done += block.size
                self._report("convert", self._num_done / self._num_items)


def _row_blocks(stored: StoredTensor) -> Iterator[Floats]:
    step = max(_BLOCK_ITEMS // (math.prod(stored.shape) // stored.num_rows), 1)
    for start in range(0, stored.num_rows, step):
        yield stored.rows(start, min(start + step, stored.num_rows))


def _dtype(dtype: str) -> Dtype:
    if dtype not in _DTYPES:
        raise ModelInvalid(f"dtype {dtype!r}; pdd packs {' and '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _silent(stage: str, fraction: float) -> None:
    pass
