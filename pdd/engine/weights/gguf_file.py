"""A GGUF file: metadata and tensor directory read in one bounded pass, tensors dequantised a few rows at a time.

Our own reader of the directory, because that of the `gguf` package takes seconds for a large vocabulary and loops on a
hostile count; the arithmetic of the quantised types is that package's.

    | "GGUF" | version u32 | tensor count u64 | key count u64 | keys and values | tensor directory | padding | tensors |

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from pdd.base.errors import ModelInvalid
from pdd.engine.weights.source import Floats, RowOrder, StoredTensor

READABLE = tuple(
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
)
"""Types of tensors that pdd dequantises."""
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING, _ARRAY = 8, 9
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT_BYTES = 32

Value = int | float | bool | str | list[int] | list[float] | list[bool] | list[str]
T = TypeVar("T", bound=Value)


class _Damaged(Exception):
    """Where reading stopped and why."""


class _Cursor:
    """Reads forward through the file; every count is checked against the bytes that are left."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.offset = 0

    def take(self, num_bytes: int) -> bytes:
        left = len(self._data) - self.offset
        if num_bytes > left:
            raise _Damaged(f"{num_bytes} bytes are announced at byte {self.offset}, but only {left} are left")
        self.offset += num_bytes
        return self._data[self.offset - num_bytes : self.offset]

    def scalar(self, layout: str) -> int | float | bool:
        value: int | float | bool = struct.unpack(layout, self.take(struct.calcsize(layout)))[0]
        return value

    def u32(self) -> int:
        return int.from_bytes(self.take(4), "little")

    def u64(self) -> int:
        return int.from_bytes(self.take(8), "little")

    def string(self) -> str:
        try:
            return self.take(self.u64()).decode()
        except UnicodeDecodeError as error:
            raise _Damaged(f"the text before byte {self.offset} is not UTF-8") from error

    def value(self) -> Value:
        kind = self.u32()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(self._layout(kind))
        kind, count = self.u32(), self.u64()
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        layout = np.dtype(self._layout(kind))
        values: list[int] = np.frombuffer(self.take(count * layout.itemsize), layout).tolist()
        return values

    def _layout(self, kind: int) -> str:
        if kind not in _SCALARS:
            raise _Damaged(f"unknown kind {kind} of value before byte {self.offset}")
        return _SCALARS[kind]


class GgufFile:
    """`metadata` by key; `tensors` as (shape, type, first byte) by name, the shape with the contiguous axis last."""

    def __init__(self, path: Path) -> None:
        """Raises ModelInvalid for a file that is absent, cut short, or no GGUF file of this machine's byte order."""
        self.path = path
        self.metadata: dict[str, Value] = {}
        self.tensors: dict[str, tuple[tuple[int, ...], GGMLQuantizationType, int]] = {}
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                self._read(_Cursor(data), len(data))
            self._data = np.memmap(path, np.uint8, mode="r")
        except _Damaged as error:
            raise ModelInvalid(f"{path}: damaged GGUF file: {error}; fetch the file again") from error
        except (OSError, ValueError) as error:  # an empty file cannot be mapped: ValueError
            raise ModelInvalid(f"{path}: {error}; fetch the file again") from error

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Raises ModelInvalid where the key is absent and has no default, or its value is of another kind."""
        value = self.metadata.get(key, default)
        if value is None:
            raise ModelInvalid(f"{self.path}: metadata {key!r} is missing; the file is damaged or too old")
        if type(value) is not kind:
            raise ModelInvalid(f"{self.path}: metadata {key!r} is {str(value)[:60]!r}, but must be a {kind.__name__}")
        return value

    def stored(self, name: str, order: RowOrder | None = None) -> StoredTensor:
        """A tensor, or the same with its rows put in `order`. Raises ModelInvalid for a type not in READABLE."""
        shape, kind, start = self.tensors[name]
        where = f"{self.path}: tensor {name!r}"
        if kind not in READABLE:
            names = ", ".join(each.name for each in READABLE)
            raise ModelInvalid(
                f"{where} is quantised as {kind.name}; pdd reads {names}: use another file of this model"
            )
        raw = self._data[start : start + _num_bytes(shape, kind)].reshape(-1, _num_bytes(shape[-1:], kind))
        rows = _vector(raw, kind, order) if len(shape) == 1 else _matrix(raw, kind, order, shape)
        return StoredTensor(where, shape, rows)

    def _read(self, cursor: _Cursor, file_bytes: int) -> None:
        if cursor.take(4) != b"GGUF":
            raise _Damaged("it does not begin with 'GGUF'")
        version = cursor.u32()
        if version not in (2, 3):
            raise _Damaged(f"its version is {version}; pdd reads 2 and 3, little endian")
        num_tensors, num_keys = cursor.u64(), cursor.u64()
        for _ in range(num_keys):
            key = cursor.string()
            self.metadata[key] = cursor.value()
        directory = [self._entry(cursor) for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT_BYTES)
        if not isinstance(alignment, int) or alignment < 1:
            raise _Damaged(f"its alignment is {alignment!r}")
        first = -(-cursor.offset // alignment) * alignment
        for name, shape, kind, offset in directory:
            end = first + offset + _num_bytes(shape, kind)
            if end > file_bytes:
                raise _Damaged(f"tensor {name!r} ends at byte {end}, but the file has {file_bytes}")
            self.tensors[name] = (shape, kind, first + offset)

    @staticmethod
    def _entry(cursor: _Cursor) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        name, num_dimensions = cursor.string(), cursor.u32()
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise _Damaged(f"tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(reversed([cursor.u64() for _ in range(num_dimensions)]))
        number, offset = cursor.u32(), cursor.u64()
        try:
            kind = GGMLQuantizationType(number)
        except ValueError:
            raise _Damaged(f"tensor {name!r} is of the unknown type {number}") from None
        if shape[-1] % GGML_QUANT_SIZES[kind][0] or not math.prod(shape):
            raise _Damaged(f"tensor {name!r} of shape {list(shape)} is not made of whole {kind.name} blocks")
        return name, shape, kind, offset


def _num_bytes(shape: tuple[int, ...], kind: GGMLQuantizationType) -> int:
    block_items, block_bytes = GGML_QUANT_SIZES[kind]
    return math.prod(shape) // block_items * block_bytes


def _vector(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, order: RowOrder | None
) -> Callable[[int, int], Floats]:
    def rows(start: int, stop: int) -> Floats:
        values: Floats = _dequantized(raw, kind)[0]
        ordered: Floats = values if order is None else values[order]
        return ordered[start:stop]

    return rows


def _matrix(
    raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType, order: RowOrder | None, shape: tuple[int, ...]
) -> Callable[[int, int], Floats]:
    def rows(start: int, stop: int) -> Floats:
        picked = raw[start:stop] if order is None else raw[order[start:stop]]
        return _dequantized(picked, kind).reshape(stop - start, *shape[1:])

    return rows


def _dequantized(raw: npt.NDArray[np.uint8], kind: GGMLQuantizationType) -> Floats:
    values: Floats = dequantize(np.ascontiguousarray(raw), kind)
    return values
