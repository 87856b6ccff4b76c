"""A model without weights that tells whether every byte of the KV cache is the right one.

The KV bytes of a token are pseudo-random functions of (token, position, layer, K or V, head), and the next token is a
hash over the KV bytes of *all* positions so far in *all* layers and heads, read through the page table. One stale, lost
or misplaced page therefore changes the text, which `continuation` foretells from the tokens alone.

The hash begins with sums, so the ranks of a set, each with some of the heads, add up to what one rank would have: each
reports to the lead, which answers. Where several ranks hold a head, the lead adds what they differ by: nothing, if all
is well.
"""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from pdd.engine.config import ModelConfig
from pdd.engine.gathering import Gathering
from pdd.engine.protocol import Sampled
from pdd.engine.runner import BatchRow, LayerProgress
from pdd.lifecycle.request import SamplingParams, TokenLogprobs
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout
from pdd.memory.shape import heads_of

Words = npt.NDArray[np.uint64]

_STORED = b"\0"
"""A rank's report that it has stored its KV of a layer."""


def _mix(words: Words) -> Words:
    """The finaliser of splitmix64 (Steele, Lea, Flood 2014): a bijection in which each bit moves all others."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _numbers(count: int, salt: int) -> Words:
    """`count` pseudo-random words."""
    return _mix(np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(salt))


class KvBytes:
    """The toy's KV of tokens, and the hash over them. Shapes follow a page: [planes, kv_heads, tokens, words].

    `layout.num_kv_heads` counts the heads of `heads`, which are of the model's `num_kv_heads`.
    """

    def __init__(self, layout: KvLayout, heads: range, num_kv_heads: int) -> None:
        self.word = np.dtype({0: np.uint64, 4: np.uint32}.get(layout.row_bytes % 8, np.uint16))
        shape = (layout.num_layers, layout.num_planes, num_kv_heads, layout.row_bytes // self.word.itemsize)
        count, ours = int(np.prod(shape)), slice(heads.start, heads.stop)
        self._salts = _numbers(count, 1).reshape(shape)[:, :, ours]
        # An odd factor is invertible modulo 2**64: a change of any one word changes the sum.
        self._factors = (_numbers(count, 2) | np.uint64(1)).reshape(shape)[:, :, ours]

    def of_tokens(self, layer: int, tokens: Words, positions: Words) -> npt.NDArray[np.unsignedinteger]:
        """KV of tokens at positions in a layer: [planes, kv_heads, tokens, words]."""
        seeds = _mix(tokens * np.uint64(0x9E3779B97F4A7C15) + _mix(positions + np.uint64(1)))
        salts = self._salts[layer][:, :, None, :]
        return (_mix(seeds[:, None] ^ salts) >> np.uint64(64 - 8 * self.word.itemsize)).astype(self.word)

    def sums(self, layer: int, pages: npt.NDArray[np.unsignedinteger]) -> Words:
        """One word per position over what pages [pages, planes, kv_heads, page_tokens, words] of a layer hold."""
        words = pages.astype(np.uint64, copy=False)
        sums: Words = np.einsum("nkhpw,khw->np", words, self._factors[layer]).reshape(-1)
        return sums


def _next_token(sums: Words, vocab_size: int) -> int:
    """The token that follows positions whose sums over all layers and heads are `sums`."""
    positions = np.arange(1, len(sums) + 1, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return int(_mix(np.add.reduce(_mix(sums + positions), keepdims=True))[0] % np.uint64(vocab_size))


def _total(reports: list[Words], num_kv_heads: int) -> Words:
    """The sums over all heads, from each rank's sums over its own."""
    num_holders = max(len(reports) // num_kv_heads, 1)  # of each head: neighbours
    total = np.zeros_like(reports[0])
    for rank, report in enumerate(reports):
        first = reports[rank - rank % num_holders]
        total += report if report is first else (report - first) * np.uint64(2 * rank + 1)
    return total


class ToyModel:
    """Ignores sampling parameters, except that stop tokens wait for `min_tokens`; every logprob is 0."""

    def __init__(self, config: ModelConfig, arena: Arena, progress: LayerProgress, gathering: Gathering) -> None:
        layout, num_kv_heads = arena.layout, config.num_kv_heads
        self._config = config
        self._layout = layout
        self._progress = progress
        self._gathering = gathering
        self._kv = KvBytes(layout, heads_of(gathering.tp_rank, gathering.tp, num_kv_heads), num_kv_heads)
        shape = (layout.num_layers, layout.num_pages, layout.num_planes, layout.num_kv_heads, layout.page_tokens, -1)
        self._cache = np.frombuffer(arena.buffer(), self._kv.word).reshape(shape)

    def forward(self, rows: list[BatchRow]) -> list[Sampled]:
        if not rows:
            return []
        for layer in range(self._config.num_layers):
            for row in rows:
                self._store(layer, row)
            if self._config.toy_layer_seconds:
                time.sleep(self._config.toy_layer_seconds)
            self._gathering.gather(_STORED)
            self._progress.layer_stored()
        return [sampled for row in rows if row.sample for sampled in self._sample(row)]

    def _store(self, layer: int, row: BatchRow) -> None:
        positions = np.arange(row.start, row.end)
        kv = self._kv.of_tokens(layer, np.array(row.tokens, np.uint64), positions.astype(np.uint64))
        pages = row.sequence.pages.first(self._layout.num_pages_for(row.end))
        page, slot = np.divmod(positions, self._layout.page_tokens)
        self._cache[layer, pages[page], :, :, slot] = kv.transpose(2, 0, 1, 3)

    def _sample(self, row: BatchRow) -> list[Sampled]:
        """One token on the lead, none elsewhere."""
        pages = row.sequence.pages.first(self._layout.num_pages_for(row.end))
        sums = np.zeros(len(pages) * self._layout.page_tokens, np.uint64)
        for layer in range(self._config.num_layers):
            sums += self._kv.sums(layer, self._cache[layer, pages])
        reports = [np.frombuffer(one, np.uint64) for one in self._gathering.gather(sums[: row.end].tobytes())]
        if not reports:
            return []
        token = _next_token(_total(reports, self._config.num_kv_heads), self._config.vocab_size)
        sampling = row.sequence.sampling
        assert sampling is not None  # the runner has checked
        token = _without_early_stop(token, len(row.sequence.output), sampling, self._config.vocab_size)
        return [Sampled(row.sequence.id, token, _logprobs(token, sampling, self._config.vocab_size))]


def _without_early_stop(token: int, num_output: int, sampling: SamplingParams, vocab_size: int) -> int:
    """The token, or the next one up that does not stop the sequence before `min_tokens`."""
    if num_output >= sampling.min_tokens:
        return token
    candidates = ((token + step) % vocab_size for step in range(vocab_size))
    return next((candidate for candidate in candidates if candidate not in sampling.stop_token_ids), token)


def _logprobs(token: int, sampling: SamplingParams, vocab_size: int) -> TokenLogprobs | None:
    if sampling.num_logprobs is None:
        return None
    top = tuple(((token + rank) % vocab_size, -float(rank)) for rank in range(min(sampling.num_logprobs, vocab_size)))
    return TokenLogprobs(token, 0.0, top)


def continuation(
    config: ModelConfig, layout: KvLayout, prompt: list[int], num_tokens: int, sampling: SamplingParams | None = None
) -> list[int]:
    """What the toy answers to a prompt when every KV byte is right, in any shape of ranks; for tests. Does not end at
    stop tokens. `layout`: of any rank."""
    kv = KvBytes(layout, range(config.num_kv_heads), config.num_kv_heads)
    sampling = sampling or SamplingParams(max_tokens=num_tokens)
    tokens = list(prompt)
    sums = np.zeros(0, np.uint64)
    for index in range(num_tokens):
        positions = np.arange(len(sums), len(tokens), dtype=np.uint64)
        new = np.array(tokens[len(sums) :], np.uint64)
        per_layer = [kv.sums(at, kv.of_tokens(at, new, positions)[None]) for at in range(layout.num_layers)]
        sums = np.concatenate([sums, np.add.reduce(per_layer)])
        token = _next_token(sums, config.vocab_size)
        tokens.append(_without_early_stop(token, index, sampling, config.vocab_size))
    return tokens[len(prompt) :]
