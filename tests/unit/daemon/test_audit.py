"""The daemon's books are looked over while it serves."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from pdd.base.ids import ReplicaName
from pdd.daemon import audit
from pdd.daemon.audit import Audit
from pdd.daemon.metrics import Metrics
from pdd.daemon.node import Node

NAME = ReplicaName("d/0")


class Books:
    def __init__(self, *problems: str) -> None:
        self.problems_now = list(problems)
        self.num_looks = 0
        self.seen_thrice = asyncio.Event()

    def problems(self) -> list[str]:
        self.num_looks += 1
        if self.num_looks == 3:
            self.seen_thrice.set()
        return self.problems_now


def node_with(**replicas: Books) -> tuple[Node, Metrics]:
    metrics = Metrics()
    node: Any = SimpleNamespace(replicas={ReplicaName(f"d/{key}"): it for key, it in replicas.items()}, metrics=metrics)
    return cast("Node", node), metrics


def counted(metrics: Metrics) -> float:
    return metrics.registry.get_sample_value("pdd:broken_invariants_total") or 0.0


def test_each_problem_is_counted_and_told_once_while_it_lasts() -> None:
    books = Books("page 3 is in 2 places")
    node, metrics = node_with(**{"0": books})
    one = Audit(node)
    with capture_logs() as logs:
        one.look()
        one.look()
        books.problems_now.append("page 4 is in 0 places")
        one.look()
        assert counted(metrics) == 2
        books.problems_now.clear()
        one.look()
        books.problems_now.append("page 3 is in 2 places")
        one.look()
    assert counted(metrics) == 3
    told = [(line["replica"], line["problems"]) for line in logs]
    assert told == [(NAME, ["page 3 is in 2 places"]), (NAME, ["page 4 is in 0 places"]), (NAME, told[0][1])]


def test_what_a_set_of_an_earlier_life_had_is_told_again() -> None:
    node, metrics = node_with(**{"0": Books("page 3 is in 2 places")})
    one = Audit(node)
    one.look()
    other = node.replicas.pop(NAME)
    one.look()
    node.replicas[ReplicaName("d/1")] = cast("Any", Books())
    one.look()
    del node.replicas[ReplicaName("d/1")]
    node.replicas[NAME] = other
    one.look()
    assert counted(metrics) == 2


async def test_every_set_has_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "EVERY_S", 0.001)
    first, second = Books(), Books()
    node, _ = node_with(**{"0": first, "1": second})
    running = asyncio.create_task(Audit(node).run())
    async with asyncio.timeout(20):
        await asyncio.gather(first.seen_thrice.wait(), second.seen_thrice.wait())
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert abs(first.num_looks - second.num_looks) <= 1
