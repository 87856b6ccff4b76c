"""Random simulations by hand: `python tests/simulation/simulate.py 1234` tells what happens in one seed, and
`python tests/simulation/simulate.py 0 5000` runs many and names those that fail."""

from __future__ import annotations

import sys
import time
from collections import Counter

from simulated_cluster import Violation
from simulated_schedule import RandomRun


class Failed(AssertionError):
    """With all that is needed to see it again."""


def simulate(seed: int) -> RandomRun:
    """Raises Failed."""
    run = RandomRun(seed)
    try:
        run.run()
    except Violation as violation:
        trace = run.cluster.trace
        told = "\n".join(f"{at:5} {label}" for at, label in enumerate(trace[-60:], max(0, len(trace) - 60)))
        raise Failed(
            f"seed {seed}: after {len(trace)} actions:\n{violation}\nthe last actions:\n{told}\n"
            f"again: python tests/simulation/simulate.py {seed}"
        ) from violation
    finally:
        run.cluster.close()
    return run


def main(arguments: list[str]) -> int:
    first, end = int(arguments[0]), int(arguments[-1]) + (len(arguments) == 1)
    failed, ends, start_s, num_actions = [], Counter[str](), time.monotonic(), 0
    for seed in range(first, end):
        try:
            run = simulate(seed)
        except Failed as failure:
            failed.append(seed)
            print(failure if len(failed) <= 3 or end - first == 1 else f"seed {seed}: {failure.__cause__}")
        else:
            ends.update(client.end or "?" for client in run.cluster.clients)
            num_actions += len(run.cluster.trace)
            if end - first == 1:
                print("\n".join(run.cluster.trace))
    took_s = time.monotonic() - start_s
    print(
        f"{end - first} seeds, {len(failed)} failed {failed[:50]}; {num_actions} actions in {took_s:.1f} s; "
        f"{dict(ends)}"
    )
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
