"""Random simulations: each seed is one run of a whole cluster, and chooses what goes wrong in it. See simulate.py."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from simulate import simulate

PROGRAM = Path(__file__).with_name("simulate.py")
SEEDS = range(2000)
"""By default; PDD_SEEDS=FIRST-LAST runs others."""
GROUP = 200


def seeds() -> range:
    first, _, last = os.environ.get("PDD_SEEDS", "").partition("-")
    return range(int(first), int(last or first) + 1) if first else SEEDS


def run_both(several: range) -> list[subprocess.CompletedProcess[str]]:
    """Half of them in each of two processes."""
    middle = several.start + (len(several) + 1) // 2
    halves = [half for half in (range(several.start, middle), range(middle, several.stop)) if half]
    commands = [[sys.executable, str(PROGRAM), str(half.start), str(half.stop)] for half in halves]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(lambda it: subprocess.run(it, capture_output=True, text=True, check=False), commands))


@pytest.mark.parametrize("first", seeds()[::GROUP])
def test_what_must_hold_holds(first: int) -> None:
    for done in run_both(range(first, min(first + GROUP, seeds().stop))):
        assert done.returncode == 0, done.stdout + done.stderr
        assert " 0 failed []" in done.stdout


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (3, 4, 5):
        assert simulate(seed).cluster.trace == simulate(seed).cluster.trace
