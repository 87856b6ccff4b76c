"""Random simulations: each seed is one run of a whole cluster, and chooses what goes wrong in it. See simulate.py."""

from __future__ import annotations

import os

import pytest
from simulate import simulate

SEEDS = range(400)
"""By default; PDD_SEEDS=FIRST-LAST runs others."""
GROUP = 20


def seeds() -> range:
    first, _, last = os.environ.get("PDD_SEEDS", "").partition("-")
    return range(int(first), int(last or first) + 1) if first else SEEDS


@pytest.mark.parametrize("first", seeds()[::GROUP])
def test_what_must_hold_holds(first: int) -> None:
    for seed in range(first, min(first + GROUP, seeds().stop)):
        simulate(seed)


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (3, 4, 5):
        assert simulate(seed).cluster.trace == simulate(seed).cluster.trace
