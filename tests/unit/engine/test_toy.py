"""The toy tells a right KV cache from a wrong one, however the prompt was cut and wherever its pages lie."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.base.errors import InvariantBroken
from pdd.base.ids import PageId, SequenceId
from pdd.engine.config import ModelConfig, Rope
from pdd.engine.gathering import Gathering
from pdd.engine.protocol import Row, StartSequence, Step
from pdd.engine.runner import LayerProgress, Runner
from pdd.engine.toy import ToyModel, continuation
from pdd.lifecycle.request import SamplingParams
from pdd.memory.arena import Arena, LayerCounter, WakeFd
from pdd.memory.layout import KvLayout

MODEL = ModelConfig(
    architecture="toy", num_layers=2, hidden_size=0, num_heads=4, num_kv_heads=2, head_dim=4, intermediate_size=0,
    vocab_size=50_000, max_position=512, rms_norm_eps=1e-5, rope=Rope(base=1e4), qkv_bias=False, output_bias=False,
    mlp_bias=False, qk_norm=False, tied_embeddings=True,
)  # fmt: skip
GREEDY = SamplingParams(max_tokens=8)
ONE = SequenceId(1)


class Toy:
    def __init__(self, page_tokens: int = 4, dtype: str = "float32", head_dim: int = 4) -> None:
        self.layout = KvLayout(
            num_layers=2, num_kv_heads=2, head_dim=head_dim, page_tokens=page_tokens, dtype=dtype, num_pages=64
        )
        self.arena, self.counter, self.wake = Arena.create(self.layout), LayerCounter.create(), WakeFd.create()
        self.model = ToyModel(MODEL, self.arena, LayerProgress(self.counter, [self.wake]), Gathering.solo())
        self.runner = Runner(self.model, self.layout, MODEL)

    def start(self, prompt: list[int], pages: list[int], sampling: SamplingParams | None = GREEDY) -> None:
        start = StartSequence(ONE, prompt, [], pages, sampling)
        self.runner.step(Step(number=0, release=[ONE], start=[start], rows=[]))

    def run(self, start: int, tokens: list[int], sample: bool) -> list[int]:
        step = Step(number=0, release=[], start=[], rows=[Row(ONE, start, tokens, [], sample)])
        return [sampled.token for sampled in self.runner.step(step)]


@contextmanager
def toy(**changes: object) -> Iterator[Toy]:
    one = Toy(**changes)  # type: ignore[arg-type]
    try:
        yield one
    finally:
        del one.runner, one.model
        for closable in (one.arena, one.counter, one.wake):
            closable.close()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_chunks_and_pages_do_not_change_the_text(data: st.DataObject) -> None:
    prompt = data.draw(st.lists(st.integers(0, MODEL.vocab_size - 1), min_size=1, max_size=40))
    page_tokens = data.draw(st.sampled_from([1, 3, 16]))
    dtype, head_dim = data.draw(st.sampled_from([("float32", 4), ("bfloat16", 2), ("bfloat16", 3), ("float32", 3)]))
    with toy(page_tokens=page_tokens, dtype=dtype, head_dim=head_dim) as one:
        pages = data.draw(st.permutations(range(64)))[: one.layout.num_pages_for(len(prompt) + 4)]
        one.start(prompt, pages)
        text, at = [], 0
        while at < len(prompt):
            size = data.draw(st.integers(1, len(prompt) - at))
            text = one.run(at, prompt[at : at + size], at + size == len(prompt))
            at += size
        for index in range(3):
            text += one.run(len(prompt) + index, text[-1:], True)
        assert text == continuation(MODEL, one.layout, prompt, 4)


def test_every_single_byte_matters() -> None:
    """Flip each byte of the cache that belongs to the sequence, in turn: the next token changes."""
    prompt = [5, 6, 7, 8, 9, 10]
    with toy() as one:
        one.start(prompt, [3, 1])
        one.run(0, prompt[:-1], False)
        right = one.run(5, prompt[-1:], True)
        cache = np.frombuffer(one.arena.buffer(), np.uint8)
        kept, changed = 0, 0
        (mine,) = np.nonzero(cache)
        for at in mine:
            cache[at] ^= 0x40
            changed += one.run(5, prompt[-1:], True) != right
            kept += 1
            cache[at] ^= 0x40
        last_token_bytes = 2 * 2 * 2 * 16  # written anew by every run: layers, K and V, heads, bytes
        assert kept > 700
        assert kept - last_token_bytes <= changed <= kept
        assert one.run(5, prompt[-1:], True) == right
        del cache


def test_a_token_beyond_the_end_does_not_matter() -> None:
    with toy() as one:
        one.start([5, 6], [3])
        right = one.run(0, [5, 6], True)
        one.run(2, [99], False)
        assert one.run(1, [6], True) == right


def test_stop_tokens_wait_for_min_tokens_and_logprobs_come_when_asked() -> None:
    with toy() as one:
        (token,) = continuation(MODEL, one.layout, [1, 2], 1)
        sampling = SamplingParams(max_tokens=8, min_tokens=1, stop_token_ids=(token,), num_logprobs=2)
        one.start([1, 2], [3], sampling)
        assert one.run(0, [1, 2], True) == [token + 1]
        assert continuation(MODEL, one.layout, [1, 2], 1, sampling) == [token + 1]
        row = Row(ONE, 1, [2], [], True)
        (sampled,) = one.runner.step(Step(number=0, release=[], start=[], rows=[row]))
        assert sampled.token == token  # one token is out: it may stop now
        assert sampled.logprobs is not None
        assert len(sampled.logprobs.top) == 2


def test_the_counter_moves_once_a_layer_and_not_for_bookkeeping() -> None:
    with toy() as one:
        one.start([1, 2, 3], [0])
        assert one.runner.step(Step(number=0, release=[], start=[], rows=[], joint=True)) == []
        assert one.counter.read() == one.wake.drain() == 0
        one.run(0, [1, 2], False)
        assert one.counter.read() == one.wake.drain() == 2


@pytest.mark.parametrize(
    "row",
    [
        Row(SequenceId(2), 0, [1], [], True),
        Row(ONE, 0, [1], [PageId(64)], False),
        Row(ONE, 0, [1], [PageId(-1)], False),
        Row(ONE, 0, [], [], False),
        Row(ONE, -1, [1], [], False),
        Row(ONE, 4, [1], [], False),
        Row(ONE, 256, [1], [PageId(0)] * 200, False),
        Row(ONE, 0, [50_000], [], False),
        Row(ONE, 0, [-1], [], False),
        Row(ONE, 0, [1], [], True),
    ],
)
def test_a_step_that_contradicts_itself_is_refused(row: Row) -> None:
    with toy() as one:
        one.start([1, 2, 3], [0], None)
        before = bytes(one.arena.buffer())
        with pytest.raises(InvariantBroken, match="sequence"):
            one.runner.step(Step(number=0, release=[], start=[], rows=[row]))
        assert bytes(one.arena.buffer()) == before
        assert one.counter.read() == 0


def test_a_released_sequence_may_start_again_with_its_output() -> None:
    with toy() as one:
        prompt = [4, 4, 2]
        expected = continuation(MODEL, one.layout, prompt, 3)
        one.start(prompt, [2, 3])
        first = one.run(0, prompt, True)
        again = StartSequence(ONE, prompt, first, [8, 7], msgspec.structs.replace(GREEDY))
        one.runner.step(Step(number=0, release=[ONE], start=[again], rows=[]))
        second = one.run(0, prompt + first, True)
        third = one.run(4, second, True)
        assert first + second + third == expected
