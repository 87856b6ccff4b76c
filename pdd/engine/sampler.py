"""From logits to tokens: the last thing an executor does in a step.

The order is vLLM's, so that the same parameters mean the same: logit bias and minimum length, penalties, temperature,
min-p, top-k, top-p. Logprobs are of the raw logits. The random number of a token depends on (seed, position) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pdd.base.errors import ReplicaFailed
from pdd.engine.protocol import Sampled
from pdd.engine.runner import BatchRow
from pdd.lifecycle.request import SamplingParams, TokenLogprobs

Floats = npt.NDArray[np.float32]

_GREEDY_BELOW = 1e-5
_MASK = (1 << 64) - 1


class Candidates(NamedTuple):
    """Tokens that may still be chosen, most likely first, and their probabilities up to a common factor."""

    tokens: npt.NDArray[np.intp]
    weights: npt.NDArray[np.float64]


def sample(logits: Floats, rows: Sequence[BatchRow]) -> list[Sampled]:
    """One token for each row. logits: [rows, vocabulary]; not changed.

    Raises ReplicaFailed where a row's logits have no finite maximum: weights or KV are damaged.
    """
    best = logits.argmax(axis=1)
    for row, token, values in zip(rows, best, logits, strict=True):
        if not np.isfinite(values[token]):
            raise ReplicaFailed(
                f"sequence {row.sequence.id}: the logits after position {row.end - 1} are not finite (maximum "
                f"{values[token]}); the weights or the KV cache are damaged, or {logits.dtype} overflows in this model"
            )
    return [_sample_row(values, row, int(token)) for values, row, token in zip(logits, rows, best, strict=True)]


def _sample_row(logits: Floats, row: BatchRow, best: int) -> Sampled:
    sampling = row.sequence.sampling
    assert sampling is not None  # the runner has checked
    output = row.sequence.output
    changed = adjusted(logits, sampling, row.sequence.prompt, output)
    if changed is not logits:
        best = int(changed.argmax())
    if sampling.temperature < _GREEDY_BELOW or changed[best] == -np.inf:  # all forbidden: no distribution is left
        token = best
    else:
        token = choose(candidates(changed, sampling), uniform(sampling.seed, row.end))
    return Sampled(row.sequence.id, token, logprobs(logits, token, sampling.num_logprobs))


def adjusted(logits: Floats, sampling: SamplingParams, prompt: list[int], output: list[int]) -> Floats:
    """Logits after bias, minimum length and penalties; the very same array where none of them applies.

    The repetition penalty (Keskar et al. 2019) counts prompt and output, the other two the output only. Biases and stop
    tokens outside the vocabulary mean nothing.
    """
    stops = []
    if len(output) < sampling.min_tokens:
        stops = [token for token in sampling.stop_token_ids if 0 <= token < len(logits)]
    penalised = sampling.frequency_penalty or sampling.presence_penalty or sampling.repetition_penalty != 1.0
    if not (sampling.logit_bias or stops or penalised):
        return logits
    logits = logits.copy()
    for token, bias in sampling.logit_bias.items():
        if 0 <= token < len(logits):
            logits[token] += bias
    if stops:
        logits[stops] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen = np.unique(np.array(prompt + output, np.intp))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    if output and (sampling.frequency_penalty or sampling.presence_penalty):
        seen, counts = np.unique(np.array(output, np.intp), return_counts=True)
        logits[seen] -= (sampling.frequency_penalty * counts + sampling.presence_penalty).astype(np.float32)
    return logits


def candidates(logits: Floats, sampling: SamplingParams) -> Candidates:
    """What temperature, min-p, top-k and top-p leave. Ties at the k-th place all stay."""
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    lowest = np.float32(-np.inf)
    if sampling.min_p > 0:
        lowest = np.log(np.float32(sampling.min_p))
    if 0 < sampling.top_k < len(scaled):
        lowest = max(lowest, np.partition(scaled, -sampling.top_k)[-sampling.top_k])
    (tokens,) = np.nonzero((scaled >= lowest) & (scaled > -np.inf))
    weights = np.exp(scaled[tokens], dtype=np.float64)
    if sampling.top_p >= 1:
        return Candidates(tokens, weights)
    return _top_p(tokens, weights, sampling.top_p)


def _top_p(tokens: npt.NDArray[np.intp], weights: npt.NDArray[np.float64], top_p: float) -> Candidates:
    """The fewest most likely tokens that have `top_p` of the probability together; at least one."""
    total = weights.sum()
    # Tokens below (1 - top_p) / n of the total are together less than what is cut off: no need to sort them.
    worth_sorting = weights >= (1 - top_p) * total / len(weights)
    tokens, weights = tokens[worth_sorting], weights[worth_sorting]
    order = np.argsort(-weights, kind="stable")
    tokens, weights = tokens[order], weights[order]
    before = np.cumsum(weights) - weights
    num_kept = max(1, int(np.count_nonzero(before < top_p * total)))
    return Candidates(tokens[:num_kept], weights[:num_kept])


def choose(among: Candidates, random: float) -> int:
    """The candidate whose share of the total covers `random` in [0, 1)."""
    sums = np.cumsum(among.weights)
    at = int(np.searchsorted(sums, random * sums[-1], side="right"))
    last = int(np.searchsorted(sums, sums[-1]))  # what follows weighs nothing
    return int(among.tokens[min(at, last)])


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) from (seed, position) alone: two rounds of splitmix64 (Steele, Lea, Flood 2014)."""
    return (_splitmix(_splitmix(seed & _MASK) ^ position) >> 11) * 2.0**-53


def _splitmix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def logprobs(logits: Floats, token: int, num_logprobs: int | None) -> TokenLogprobs | None:
    """Of the chosen token and the `num_logprobs` most likely ones; None where none are asked for."""
    if num_logprobs is None:
        return None
    maximum = logits.max()
    log_total = maximum + np.log(np.exp(logits - maximum, dtype=np.float64).sum())
    num_top = min(num_logprobs, len(logits))
    top = np.argpartition(logits, -num_top)[-num_top:] if num_top else np.zeros(0, np.intp)
    top = top[np.lexsort((top, -logits[top]))]
    return TokenLogprobs(
        token, float(logits[token] - log_total), tuple((int(one), float(logits[one] - log_total)) for one in top)
    )
