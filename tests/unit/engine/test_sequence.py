from __future__ import annotations

import pytest

from pdd.base.errors import InvariantBroken
from pdd.base.ids import PageId, RequestId, SequenceId
from pdd.engine.sequence import Sequence
from pdd.lifecycle.request import SamplingParams


def sequence(prompt: tuple[int, ...], sampling: SamplingParams | None, cached: int, computed: int) -> Sequence:
    return Sequence(
        id=SequenceId(1),
        request=RequestId("r"),
        prompt=prompt,
        sampling=sampling,
        pages=[PageId(0)],
        num_cached=cached,
        num_computed=computed,
    )


SAMPLING = SamplingParams(max_tokens=4)


def test_a_prefill_replica_leaves_the_last_token() -> None:
    prefill = sequence((1, 2, 3), None, 0, 0)
    assert (prefill.goal, prefill.num_remaining, prefill.decoding) == (2, 2, False)
    assert not sequence((1, 2), None, 0, 0).decoding


def test_a_handed_off_sequence_decodes_at_once() -> None:
    assert sequence((1, 2, 3), SAMPLING, 0, 2).decoding
    assert not sequence((1, 2, 3), SAMPLING, 0, 1).decoding


def test_sampled_tokens_move_the_goal() -> None:
    decoding = sequence((1, 2, 3), SAMPLING, 0, 2)
    decoding.num_computed = 3
    decoding.tokens.append(9)
    assert (decoding.goal, decoding.num_tokens, decoding.num_output, decoding.output) == (4, 4, 1, [9])
    assert decoding.prompt == (1, 2, 3)


def test_a_preempted_sequence_has_everything_to_do_again() -> None:
    decoding = sequence((1, 2, 3), SAMPLING, 0, 2)
    decoding.tokens.append(9)
    decoding.num_pages_sent = 1
    decoding.lose_pages()
    assert (decoding.pages, decoding.num_remaining, decoding.num_pages_sent) == ([], 4, None)
    decoding.gain_pages([PageId(7)], 2)
    assert (decoding.pages, decoding.num_cached, decoding.num_remaining) == ([PageId(7)], 2, 2)


@pytest.mark.parametrize(("cached", "computed"), [(2, 1), (0, 4), (-1, 0)])
def test_lengths_out_of_order_are_refused(cached: int, computed: int) -> None:
    with pytest.raises(InvariantBroken, match=f"{cached} cached <= {computed} computed <= 3 tokens"):
        sequence((1, 2, 3), SAMPLING, cached, computed)
