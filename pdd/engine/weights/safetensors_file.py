"""Safetensors, read and written by hand: the format is a JSON header and raw bytes, and neither numpy's bfloat16 (there
is none) nor a torch import should stand between a checkpoint and its pack.

    | header length (u64, little endian) | JSON: name -> {dtype, shape, data_offsets} | the tensors' bytes |

Format: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from pdd.base.errors import ModelInvalid
from pdd.engine.config import Dtype
from pdd.engine.weights.source import Floats, StoredTensor
from pdd.engine.weights.tensors import PackedTensor

MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""
ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1}
_STORED_AS: dict[str, np.dtype[np.generic]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_NAMES: Mapping[Dtype, str] = {"float32": "F32", "bfloat16": "BF16"}
_ALIGNMENT_BYTES = 64
Bytes = npt.NDArray[np.uint8]


class Entry(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True):
    tensors: dict[str, Entry]
    data_start: int
    """Offset of the tensors' bytes in the file."""


def read_header(path: Path) -> Header:
    """Raises ModelInvalid for a file that is absent, cut short, or no safetensors file; reads only the header."""
    try:
        with path.open("rb") as file:
            file_bytes = os.fstat(file.fileno()).st_size
            header_bytes = int.from_bytes(file.read(8), "little")
            if file_bytes < 8 or not 2 <= header_bytes <= min(MAX_HEADER_BYTES, file_bytes - 8):
                raise _damaged(path, f"a header of {header_bytes} bytes does not fit a file of {file_bytes}")
            raw = msgspec.json.decode(file.read(header_bytes), type=dict[str, msgspec.Raw])
            raw.pop("__metadata__", None)
            tensors = {name: msgspec.json.decode(entry, type=Entry) for name, entry in raw.items()}
    except OSError as error:
        raise ModelInvalid(f"{path}: {error.strerror}; fetch the model again") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise _damaged(path, f"its header is not what the format calls for ({error})") from error
    data_bytes = file_bytes - 8 - header_bytes
    for name, entry in tensors.items():
        _check_entry(path, name, entry, data_bytes)
    return Header(tensors, 8 + header_bytes)


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The file's tensors by name, mapped and not yet read. Raises ModelInvalid like `read_header`."""
    header = read_header(path)
    try:
        data = np.memmap(path, np.uint8, mode="r", offset=0)
    except OSError as error:
        raise ModelInvalid(f"{path}: {error.strerror}; fetch the model again") from error
    return {name: _stored(path, name, entry, data[header.data_start :]) for name, entry in header.tensors.items()}


def write(
    path: Path, dtype: Dtype, tensors: list[PackedTensor], blocks: Callable[[PackedTensor], Iterator[Floats]]
) -> None:
    """Write `tensors`; the values of each arrive in order as `blocks` of any size. The disk space is claimed first, so
    that a full disk is known before the work. Raises OSError."""
    entries, offset = {}, 0
    for tensor in tensors:
        stored_as = _NAMES[tensor.dtype or dtype]
        end = offset + math.prod(tensor.shape) * ITEM_BYTES[stored_as]
        entries[tensor.name] = Entry(stored_as, tensor.shape, (offset, end))
        offset = end
    header = msgspec.json.encode(entries)
    header += b" " * (-(8 + len(header)) % _ALIGNMENT_BYTES)
    with path.open("xb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(header) + offset)
        file.write(len(header).to_bytes(8, "little") + header)
        for tensor in tensors:
            for block in blocks(tensor):
                file.write(_encoded(block, tensor.dtype or dtype).data)
        file.flush()
        os.fsync(file.fileno())


def bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Rounded to the nearest bfloat16, ties to even, as its 16 bits. Finite input only (a NaN could turn infinite)."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype(np.uint16)


def _encoded(values: Floats, dtype: Dtype) -> npt.NDArray[np.generic]:
    if dtype == "bfloat16":
        return bfloat16_bits(values).astype("<u2", copy=False)
    return np.ascontiguousarray(values, "<f4")


def _check_entry(path: Path, name: str, entry: Entry, data_bytes: int) -> None:
    begin, end = entry.data_offsets
    if not 0 <= begin <= end or any(size < 0 for size in entry.shape):
        raise _damaged(path, f"tensor {name!r} claims bytes {begin} to {end} and shape {list(entry.shape)}")
    if end > data_bytes:
        raise _damaged(path, f"tensor {name!r} ends at byte {end}, but only {data_bytes} bytes of data are there")
    item_bytes = ITEM_BYTES.get(entry.dtype)
    if item_bytes is not None and math.prod(entry.shape) * item_bytes != end - begin:
        raise _damaged(path, f"tensor {name!r} of shape {list(entry.shape)} ({entry.dtype}) holds {end - begin} bytes")


def _stored(path: Path, name: str, entry: Entry, data: Bytes) -> StoredTensor:
    where, shape, (begin, end) = f"{path}: tensor {name!r}", entry.shape, entry.data_offsets

    def rows(start: int, stop: int) -> Floats:
        stored_as = _STORED_AS.get(entry.dtype)
        if stored_as is None:
            raise ModelInvalid(
                f"{where} is stored as {entry.dtype}; pdd reads F32, F16 and BF16: use the model's unquantised files"
            )
        width = shape[-1:] if len(shape) > 1 else ()
        row_bytes = math.prod(width) * stored_as.itemsize
        raw = np.ascontiguousarray(data[begin:end][start * row_bytes : stop * row_bytes])
        return _as_float32(raw.view(stored_as), entry.dtype).reshape(stop - start, *width)

    return StoredTensor(where, shape, rows)


def _as_float32(values: npt.NDArray[np.generic], dtype: str) -> Floats:
    if dtype == "BF16":
        return (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return values.astype(np.float32)


def _damaged(path: Path, what: str) -> ModelInvalid:
    return ModelInvalid(f"{path}: damaged safetensors file: {what}; fetch the file again")
