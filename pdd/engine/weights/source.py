"""What every kind of model file is read as before it is packed.

A source names its own tensors by the pieces of weights/tensors.py; nothing else differs between kinds of files.

    Hugging Face directory  --.
    GGUF file               ---+-->  Source  --pack.py-->  config.json, text.json, tokenizer.json, weights-*.safetensors
    toy directory           --'
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig, TextConfig
from pdd.engine.weights.tensors import Shape, packed_tensors

Floats = npt.NDArray[np.float32]
RowOrder = npt.NDArray[np.intp]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file holds it. Its rows are those of the matrix that is as wide as its last axis; a vector's rows
    are its numbers. `rows(start, stop)` reads some as float32: [stop - start, width], or [stop - start]."""

    where: str
    """File and name, for messages."""
    shape: Shape
    rows: Callable[[int, int], Floats]

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else math.prod(self.shape)

    def picked(self, order: RowOrder, shape: Shape) -> StoredTensor:
        """A tensor of `shape` made of the rows `order[0]`, `order[1]`, ... of this one. Neighbours in `order` should
        lie near each other: all between them is read."""

        def rows(start: int, stop: int) -> Floats:
            wanted = order[start:stop]
            low, high = int(wanted.min()), int(wanted.max())
            return self.rows(low, high + 1)[wanted - low]

        return StoredTensor(self.where, shape, rows)


@dataclass(frozen=True)
class Source:
    """A model that was read far enough to know that it can be packed."""

    path: Path
    config: ModelConfig
    text: TextConfig
    tokenizer_json: bytes | None
    pieces: Mapping[str, StoredTensor] = field(default_factory=dict)


def bind(
    path: Path,
    config: ModelConfig,
    names: Mapping[str, str],
    stored: Mapping[str, StoredTensor],
    unused: frozenset[str],
) -> dict[str, StoredTensor]:
    """The stored tensor of each piece, where `names` maps the last word of a piece (with `{}` for each of its numbers)
    to the name in the files. Raises ModelInvalid for a tensor that is missing, has the wrong shape, or
    has no place in the network (and is not in `unused`): leaving it out would silently compute something else."""
    pieces, missing, known = {}, [], set(unused)
    for tensor in packed_tensors(config):
        for piece in tensor.pieces:
            *prefix, word = piece.name.split(".")
            name = names[word].format(*prefix[1:])
            known.add(name)
            if name not in stored:
                missing.append(name)
                continue
            pieces[piece.name] = stored[name]
            check_shape(stored[name], piece.shape)
    if missing:
        raise ModelInvalid(
            f"{path}: {len(missing)} tensors are missing, for example {missing[0]!r}: the download is incomplete, or "
            f"the configuration describes another model; fetch the model again"
        )
    if strange := sorted(set(stored) - known):
        raise ModelInvalid(
            f"{path}: {len(strange)} tensors have no place in this kind of model, for example {strange[0]!r}: it is a "
            f"variant (quantised, adapted, or with extra parts) that pdd does not run"
        )
    return pieces


def check_shape(stored: StoredTensor, shape: Shape) -> None:
    """Raises ModelInvalid where the file's tensor has another shape than the configuration calls for."""
    if stored.shape != shape:
        raise ModelInvalid(
            f"{stored.where} has shape {list(stored.shape)}, but the model's configuration calls "
            f"for {list(shape)}: the files do not belong together; fetch the model again"
        )
