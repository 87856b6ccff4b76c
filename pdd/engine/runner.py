"""The executor's bookkeeping: a `Step` from the daemon becomes rows for the model, with tokens and page tables.

Nothing here knows torch; a model is anything with `forward(rows)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from pdd.base.errors import InvariantBroken
from pdd.base.ids import SequenceId
from pdd.engine.config import ModelConfig
from pdd.engine.protocol import Row, Sampled, StartSequence, Step
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import LayerCounter, WakeFd
from pdd.memory.layout import KvLayout


class PageTable:
    """Pages of one sequence in order of position, as int32 that C reads in place."""

    def __init__(self, pages: list[int]) -> None:
        self._pages = np.zeros(max(16, len(pages)), np.int32)
        self._num_pages = 0
        self.address: int = self._pages.ctypes.data
        self.extend(pages)

    def __len__(self) -> int:
        return self._num_pages

    def extend(self, pages: list[int]) -> None:
        end = self._num_pages + len(pages)
        if end > len(self._pages):
            self._pages = np.resize(self._pages, 2 * end)
            self.address = self._pages.ctypes.data
        self._pages[self._num_pages : end] = pages
        self._num_pages = end

    def first(self, num_pages: int) -> npt.NDArray[np.int32]:
        return self._pages[:num_pages]


class SequenceState:
    """What an executor knows of a sequence between steps."""

    __slots__ = ("id", "output", "pages", "prompt", "sampling")

    def __init__(self, start: StartSequence) -> None:
        self.id = start.sequence
        self.prompt = start.prompt
        self.output = list(start.output)
        self.pages = PageTable(start.pages)
        self.sampling: SamplingParams | None = start.sampling


class BatchRow:
    """Tokens to run at positions `start ... end - 1` of a sequence; the first `start` positions are in the cache."""

    __slots__ = ("end", "sample", "sequence", "start", "tokens")

    def __init__(self, sequence: SequenceState, start: int, tokens: list[int], sample: bool) -> None:
        self.sequence = sequence
        self.start = start
        self.end = start + len(tokens)
        self.tokens = tokens
        self.sample = sample


class LayerProgress:
    """Tells the daemon's C library, layer by layer, that the KV of a step is in place.

    All ranks of a set tell, but only the lead's counter is seen: it stands for the whole set (docs/adr/0012).
    """

    def __init__(self, counter: LayerCounter, wakes: Sequence[WakeFd]) -> None:
        self._counter = counter
        self._wakes = wakes

    def layer_stored(self) -> None:
        """The KV of one more layer of the running step is stored, on all ranks of the set."""
        self._counter.add(1)
        for wake in self._wakes:
            wake.notify()


class Model(Protocol):
    def forward(self, rows: list[BatchRow]) -> list[Sampled]:
        """Run the rows, store their KV (telling each layer), and sample where a row asks for it; the lead of a set
        answers, its other ranks return nothing. Without rows: only take part in what all ranks of the replica do."""
        ...


def num_positions(config: ModelConfig, layout: KvLayout) -> int:
    """Tokens of the longest sequence that can ever run: the model's limit, or all pages of the arena."""
    return min(config.max_position, layout.num_pages * layout.page_tokens)


class Runner:
    """Steps in, sampled tokens out; one per executor."""

    def __init__(self, model: Model, layout: KvLayout, config: ModelConfig) -> None:
        self._model = model
        self._layout = layout
        self._vocab_size = config.vocab_size
        self._max_position = num_positions(config, layout)
        self._sequences: dict[SequenceId, SequenceState] = {}

    def step(self, step: Step) -> list[Sampled]:
        """Raises InvariantBroken for a step that contradicts what came before: the daemon's bug, not the client's."""
        for sequence in step.release:
            self._sequences.pop(sequence, None)
        for start in step.start:
            self._check_pages(start.sequence, start.pages)
            self._sequences[start.sequence] = SequenceState(start)
        if not (step.rows or step.joint):
            return []
        sampled = self._model.forward([self._row(row) for row in step.rows])
        for one in sampled:
            self._sequences[one.sequence].output.append(one.token)
        return sampled

    def _row(self, row: Row) -> BatchRow:
        sequence = self._sequences.get(row.sequence)
        if sequence is None:
            raise InvariantBroken(f"a row names sequence {row.sequence}, which was never started or is released")
        self._check_pages(row.sequence, row.new_pages)
        sequence.pages.extend(row.new_pages)
        batch_row = BatchRow(sequence, row.start, row.tokens, row.sample)
        if not row.tokens or row.start < 0 or batch_row.end > self._max_position:
            raise InvariantBroken(
                f"sequence {row.sequence}: a row of {len(row.tokens)} tokens at {row.start}, where a sequence "
                f"has at most {self._max_position}"
            )
        if self._layout.num_pages_for(batch_row.end) > len(sequence.pages):
            raise InvariantBroken(
                f"sequence {row.sequence}: {batch_row.end} tokens do not fit its {len(sequence.pages)} pages "
                f"of {self._layout.page_tokens} tokens"
            )
        if not 0 <= min(row.tokens) <= max(row.tokens) < self._vocab_size:
            raise InvariantBroken(f"sequence {row.sequence}: a token id outside the vocabulary of {self._vocab_size}")
        if row.sample and sequence.sampling is None:
            raise InvariantBroken(f"sequence {row.sequence} is to be sampled but came without sampling parameters")
        return batch_row

    def _check_pages(self, sequence: SequenceId, pages: list[int]) -> None:
        if pages and not 0 <= min(pages) <= max(pages) < self._layout.num_pages:
            raise InvariantBroken(f"sequence {sequence}: a page outside the arena of {self._layout.num_pages} pages")
