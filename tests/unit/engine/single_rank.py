"""A whole model on one rank, driven row by row, and what transformers says to the same tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pdd.base.ids import SequenceId
from pdd.engine.attention import BatchPlan
from pdd.engine.models.decoder import Decoder
from pdd.engine.models.deepseek import load_deepseek
from pdd.engine.models.llama import load_llama
from pdd.engine.pack import PackedModel
from pdd.engine.parallel import Parallel
from pdd.engine.protocol import StartSequence
from pdd.engine.runner import BatchRow, LayerProgress, SequenceState
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout

VOCAB_SIZE = 97
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)


class Engine:
    """A loaded model with its arena and a page for everyone."""

    def __init__(self, packed: PackedModel, page_tokens: int = 16, num_pages: int = 64) -> None:
        config = packed.config
        layout = KvLayout(
            num_layers=config.num_layers, num_planes=config.num_planes, num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim, page_tokens=page_tokens, dtype=packed.dtype, num_pages=num_pages,
        )  # fmt: skip
        self.layout = layout
        self.arena, self.counter, self.wake = Arena.create(layout), LayerCounter.create(), WakeFd.create()
        progress = LayerProgress(self.counter, [self.wake])
        load = load_deepseek if config.mla else load_llama
        self.model: Decoder = load(packed, self.arena, progress, Parallel.solo(), 1)
        self.free = torch.randperm(num_pages, generator=torch.Generator().manual_seed(3)).tolist()

    def sequence(self, prompt: list[int], room: int) -> SequenceState:
        count = self.layout.num_pages_for(len(prompt) + room)
        pages, self.free = self.free[:count], self.free[count:]
        return SequenceState(StartSequence(SequenceId(len(self.free)), prompt, [], pages, GREEDY))

    def logits(self, *rows: BatchRow) -> torch.Tensor | None:
        return self.model.logits(BatchPlan(list(rows), self.layout.page_tokens))

    def prefill(self, sequence: SequenceState, chunk_tokens: int) -> torch.Tensor:
        """Logits after the whole prompt, which runs in chunks."""
        tokens = sequence.prompt
        for start in range(0, len(tokens), chunk_tokens):
            chunk = tokens[start : start + chunk_tokens]
            logits = self.logits(BatchRow(sequence, start, chunk, start + len(chunk) == len(tokens)))
        assert logits is not None
        return logits[0]

    def generate(self, prompt: list[int], num_tokens: int) -> list[int]:
        sequence = self.sequence(prompt, num_tokens)
        tokens, start = prompt, 0
        for _ in range(num_tokens):
            (sampled,) = self.model.forward([BatchRow(sequence, start, tokens, True)])
            start += len(tokens)
            tokens = [sampled.token]
            sequence.output.append(sampled.token)
        return sequence.output

    def close(self) -> None:
        for one in (self.arena, self.counter, self.wake):
            one.close()


def save(oracle: Any, path: Path) -> Path:
    """With a tokenizer of whole words, which no test reads."""
    from tokenizers import Tokenizer  # noqa: PLC0415
    from tokenizers.models import WordLevel  # noqa: PLC0415

    oracle.save_pretrained(path)
    words = {f"w{index}": index for index in range(VOCAB_SIZE)}
    Tokenizer(WordLevel(words, unk_token="w0")).save(str(path / "tokenizer.json"))
    return path


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(2, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def expected_logits(oracle: Any, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = oracle(torch.tensor([tokens])).logits[0, -1]
    return logits


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)


def check_mixed_batch(oracle: Any, packed: PackedModel) -> None:
    """Decodes, a fresh prompt, a later chunk that is sampled and one that is not, in one step and in any order."""
    engine = Engine(packed, page_tokens=4, num_pages=256)
    lengths = (70, 40, 3, 90, 21)
    sequences = [engine.sequence(prompt_of(length, seed), 1) for seed, length in enumerate(lengths)]
    done = (69, 0, 0, 50, 20)  # positions already in the cache; the step runs the rest, or 30 of it
    for sequence, count in zip(sequences, done, strict=True):
        if count:
            engine.logits(BatchRow(sequence, 0, sequence.prompt[:count], False))
    rows = [
        BatchRow(sequence, count, sequence.prompt[count : count + 30], count + 30 >= len(sequence.prompt))
        for sequence, count in zip(sequences, done, strict=True)
    ]
    plan = BatchPlan(rows[::-1], 4)
    logits = engine.model.logits(plan)
    assert logits is not None
    assert {row.sequence.id for row in plan.sampled_rows} == {sequences[at].id for at in (0, 2, 4)}
    for row, one in zip(plan.sampled_rows, logits, strict=True):
        close(one, expected_logits(oracle, row.sequence.prompt))
    for at, start in ((1, 30), (3, 80)):
        sequence = sequences[at]
        rest = engine.logits(BatchRow(sequence, start, sequence.prompt[start:], True))
        assert rest is not None
        close(rest[0], expected_logits(oracle, sequence.prompt))
    engine.close()
