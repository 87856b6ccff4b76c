"""Each sampling parameter alone against its definition, and the whole against the distribution it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.base.errors import ReplicaFailed
from pdd.base.ids import SequenceId
from pdd.engine.protocol import StartSequence
from pdd.engine.runner import BatchRow, SequenceState
from pdd.engine.sampler import Floats, adjusted, candidates, choose, sample, uniform
from pdd.lifecycle.request import SamplingParams


def params(**values: object) -> SamplingParams:
    return SamplingParams(max_tokens=9, **values)  # type: ignore[arg-type]


def row(sampling: SamplingParams, prompt: list[int] | None = None, output: list[int] | None = None) -> BatchRow:
    prompt, output = prompt or [0], output or []
    state = SequenceState(StartSequence(SequenceId(5), prompt, output, [0], sampling))
    tokens = prompt + output
    return BatchRow(state, len(tokens) - 1, tokens[-1:], True)


def logits_of(size: int, seed: int = 0, scale: float = 2.0) -> Floats:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


def softmax(logits: Floats) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    weights = np.exp(logits.astype(np.float64) - logits.max())
    return weights / weights.sum()  # type: ignore[no-any-return]


def test_greedy_takes_the_first_of_the_best() -> None:
    logits = np.array([[0, 3, 3], [5, 1, 2]], np.float32)
    greedy = params(temperature=0.0)
    assert [one.token for one in sample(logits, [row(greedy), row(greedy)])] == [1, 0]
    assert sample(logits[:1], [row(greedy)])[0].logprobs is None


def test_the_whole_distribution_is_followed() -> None:
    """20000 seeds; chi-square over the tokens that are likely enough to count."""
    logits, draws = logits_of(40), 20_000
    among = candidates(logits, params(temperature=0.7))
    counts = np.bincount([choose(among, uniform(seed, 12)) for seed in range(draws)], minlength=40)
    expected = softmax(logits / np.float32(0.7)) * draws
    likely = expected > 5
    chi_square = float(((counts - expected)[likely] ** 2 / expected[likely]).sum())
    assert chi_square < likely.sum() + 5 * np.sqrt(2 * likely.sum())
    assert counts[~likely].sum() < 50


def test_random_numbers_are_of_seed_and_position_alone() -> None:
    logits = np.stack([logits_of(50, seed) for seed in range(3)])
    rows = [row(params(seed=seed), output=[1] * seed) for seed in range(3)]
    together = [one.token for one in sample(logits, rows)]
    alone = [sample(logits[at : at + 1], [rows[at]])[0].token for at in (2, 1, 0)]
    assert together == alone[::-1]
    numbers = {uniform(seed, position) for seed in (-1, 0, 1, 1 << 63, 1 << 70) for position in range(1000)}
    assert len(numbers) == 5000 - 1000  # seeds are taken modulo 2**64: 1 << 70 is 0
    assert all(0 <= number < 1 for number in numbers)
    assert abs(np.mean(list(numbers)) - 0.5) < 0.02


@settings(max_examples=200, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=60),
    top_p=st.floats(0.01, 1.0),
    top_k=st.integers(0, 70),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 1.0]),
    temperature=st.sampled_from([1e-4, 0.5, 1.0, 3.0]),
)
def test_candidates_are_those_of_the_definitions(
    logits: list[float], top_p: float, top_k: int, min_p: float, temperature: float
) -> None:
    values = np.array(logits, np.float32)
    among = candidates(values, params(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p))
    chosen = set(among.tokens.tolist())
    probabilities = softmax((values - values.max()) / np.float32(temperature))
    order = np.argsort(-probabilities, kind="stable")
    assert int(order[0]) in {int(at) for at in np.flatnonzero(probabilities == probabilities.max())}
    assert probabilities[among.tokens].max() == probabilities.max()
    if top_k:
        assert all((probabilities > probabilities[token]).sum() < top_k for token in chosen)
    if min_p:
        assert all(probabilities[token] >= min_p * probabilities.max() * 0.999 for token in chosen)
    left = [token for token in range(len(values)) if token not in chosen]
    if chosen and left and not top_k and not min_p:
        covered = probabilities[among.tokens].sum()
        assert covered >= top_p - 1e-6
        assert covered - probabilities[among.tokens].min() <= top_p + 1e-6
        assert probabilities[among.tokens].min() >= probabilities[left].max() - 1e-12
    if not top_k and not min_p and top_p == 1:
        assert len(left) == (values < values.max() - 700 * temperature).sum() or not left


def test_top_p_counts_what_top_k_left() -> None:
    """0.5, 0.3, 0.2 renormalised to two: 0.625, 0.375."""
    logits = np.log(np.array([0.2, 0.5, 0.3], np.float32))
    assert candidates(logits, params(top_k=2, top_p=0.6)).tokens.tolist() == [1]
    assert candidates(logits, params(top_k=2, top_p=0.7)).tokens.tolist() == [1, 2]
    assert candidates(logits, params(top_p=0.6)).tokens.tolist() == [1, 2]


def test_a_random_number_at_either_end_takes_a_possible_token() -> None:
    logits = np.array([-np.inf, 2, 1, -np.inf, -500], np.float32)
    among = candidates(logits, params())
    assert choose(among, 0.0) == 1
    assert choose(among, np.nextafter(1, 0)) == 2


def test_penalties() -> None:
    logits = np.array([2, -2, 1, 1, 0, 3], np.float32)
    prompt, output = [0, 1, 2], [2, 3, 3]
    repeated = adjusted(logits, params(repetition_penalty=2.0), prompt, output)
    assert repeated.tolist() == [1, -4, 0.5, 0.5, 0, 3]
    counted = adjusted(logits, params(frequency_penalty=0.5, presence_penalty=0.25), prompt, output)
    assert counted.tolist() == [2, -2, 0.25, -0.25, 0, 3]
    assert adjusted(logits, params(frequency_penalty=0.5), prompt, []).tolist() == logits.tolist()
    both = adjusted(logits, params(repetition_penalty=2.0, presence_penalty=1.0), prompt, output)
    assert both.tolist() == [1, -4, -0.5, -0.5, 0, 3]


def test_bias_and_minimum_length() -> None:
    logits = np.array([0, 1, 2, 3], np.float32)
    biased = adjusted(logits, params(logit_bias={0: 100.0, 3: -100.0}), [0], [])
    assert biased.tolist() == [100, 1, 2, -97]
    stops = params(temperature=0.0, min_tokens=2, stop_token_ids=(3, 2))
    assert sample(logits[None], [row(stops, output=[1])])[0].token == 1
    assert sample(logits[None], [row(stops, output=[1, 1])])[0].token == 3


def test_tokens_outside_the_vocabulary_mean_nothing() -> None:
    logits = np.array([0, 1, 2], np.float32)
    strange = params(logit_bias={3: 9.0, -1: 9.0}, min_tokens=1, stop_token_ids=(3, 2))
    assert adjusted(logits, strange, [0], []).tolist() == [0, 1, -np.inf]


def test_a_token_comes_out_even_if_all_are_forbidden() -> None:
    forbidden = params(min_tokens=1, stop_token_ids=(0, 1, 2))
    assert sample(logits_of(3)[None], [row(forbidden)])[0].token == 0


def test_plain_parameters_touch_nothing() -> None:
    logits = logits_of(30)
    assert adjusted(logits, params(), [1], [2]) is logits
    before = logits.copy()
    everything = params(
        logit_bias={1: 2.0}, repetition_penalty=1.3, frequency_penalty=1.0, top_p=0.9, top_k=9, min_p=0.01,
        min_tokens=5, stop_token_ids=(4,), num_logprobs=3,
    )  # fmt: skip
    sample(logits[None], [row(everything, [1, 2], [3, 3])])
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 99])
def test_logprobs_are_of_the_raw_logits(num_logprobs: int) -> None:
    logits = logits_of(20)
    sampling = params(temperature=0.3, num_logprobs=num_logprobs, logit_bias={int(logits.argmin()): 100.0})
    (sampled,) = sample(logits[None], [row(sampling)])
    assert sampled.token == logits.argmin()
    assert sampled.logprobs is not None
    expected = np.log(softmax(logits))
    assert sampled.logprobs.token == sampled.token
    assert sampled.logprobs.logprob == pytest.approx(expected[sampled.token], abs=1e-5)
    order = np.argsort(-expected)[: min(num_logprobs, 20)]
    assert [token for token, _ in sampled.logprobs.top] == order.tolist()
    assert [logprob for _, logprob in sampled.logprobs.top] == pytest.approx(expected[order], abs=1e-5)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(poison: float) -> None:
    logits = np.stack([logits_of(20), logits_of(20)])
    logits[1, 3] = poison
    with pytest.raises(ReplicaFailed, match="sequence 5: the logits after position 0 are not finite"):
        sample(logits, [row(params(temperature=0.0)), row(params(temperature=0.0))])
    with pytest.raises(ReplicaFailed, match="not finite"):
        sample(np.full((1, 5), -np.inf, np.float32), [row(params())])
