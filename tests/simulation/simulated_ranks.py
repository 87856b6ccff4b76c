"""The executors of one replica set, in this process: the toy model on memory of its own, moved layer by layer."""

from __future__ import annotations

import ctypes
from collections.abc import Generator
from typing import Any, cast

import numpy as np

from pdd.base.errors import InvariantBroken
from pdd.engine.config import ModelConfig, Rope
from pdd.engine.gathering import Gathering
from pdd.engine.protocol import Sampled, Step
from pdd.engine.runner import BatchRow, LayerProgress, Runner
from pdd.engine.toy import ToyModel
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape

MODEL = ModelConfig(
    architecture="toy", num_layers=2, hidden_size=0, num_heads=2, num_kv_heads=2, head_dim=2, intermediate_size=0,
    vocab_size=50_000, max_position=512, rms_norm_eps=1e-5, rope=Rope(base=1e4), qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip


class Memory:
    """Stands for an Arena."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self._bytes = np.zeros(layout.arena_bytes, np.uint8)
        self.address = self._bytes.ctypes.data

    def buffer(self) -> memoryview:
        return self._bytes.data

    def page_at(self, address: int) -> int:
        """The page that an address of the arena lies in."""
        return (address - self.address) % self.layout.layer_bytes // self.layout.page_bytes


class _Reports:
    """Stands for a Gathering: the lead asks last."""

    def __init__(self, tp_rank: int, tp: int, reports: list[bytes]) -> None:
        self.tp_rank = tp_rank
        self.tp = tp
        self._reports = reports

    def gather(self, report: bytes) -> list[bytes]:
        if self.tp_rank:
            self._reports.append(report)
            return []
        gathered = [report, *self._reports]
        self._reports.clear()
        return gathered


class _SteppedToy(ToyModel):
    """A toy whose step is taken apart."""

    rows: list[BatchRow]

    def forward(self, rows: list[BatchRow]) -> list[Sampled]:
        self.rows = rows
        return []

    def store(self, layer: int) -> None:
        for row in self.rows:
            self._store(layer, row)

    def sample(self, row: BatchRow) -> list[Sampled]:
        return self._sample(row)


class SimulatedRanks:
    """tp ranks and their layer counter."""

    def __init__(self, shape: KvShape) -> None:
        self.memories = [Memory(shape.layout) for _ in range(shape.tp)]
        self._counter = ctypes.c_uint64(0)
        self.counter_address = ctypes.addressof(self._counter)
        self.step: Step | None = None
        """The one that has been read and not yet answered."""
        self._num_layers = shape.layout.num_layers
        reports: list[bytes] = []
        self._models = [
            _SteppedToy(
                MODEL,
                cast("Arena", memory),
                cast("LayerProgress", None),
                cast("Gathering", _Reports(rank, shape.tp, reports)),
            )
            for rank, memory in enumerate(self.memories)
        ]
        self._runners = [Runner(model, shape.layout, MODEL) for model in self._models]

    @property
    def num_sequences(self) -> int:
        """That the executors remember."""
        return len(self._runners[0]._sequences)

    def compute(self, step: Step) -> Generator[None, None, list[Sampled]]:
        """Pauses after each thing that happens: the step is read, each layer is stored, and tokens are sampled."""
        for runner in self._runners:
            runner.step(step)
        self.step = step
        yield
        for layer in range(self._num_layers if step.rows else 0):
            for model in self._models:
                model.store(layer)
            self._counter.value += 1
            yield
        sampled = [one for index, row in enumerate(step.rows) if row.sample for one in self._sample(index)]
        self.step = None
        yield
        return sampled

    def _sample(self, index: int) -> list[Sampled]:
        sampled: list[Sampled] = []
        for model in reversed(self._models):
            sampled += model.sample(model.rows[index])
        for model in self._models:
            model.rows[index].sequence.output.append(sampled[0].token)
        return sampled

    def written_pages(self, index: int) -> list[int]:
        """Pages that a row of the present step writes to."""
        row: Any = self._models[0].rows[index]
        layout = self.memories[0].layout
        first, end = row.start // layout.page_tokens, layout.num_pages_for(row.end)
        if end > len(row.sequence.pages):
            raise InvariantBroken(f"row {index} ends at {row.end}, beyond its pages")
        return [int(page) for page in row.sequence.pages.first(end)[first:]]
