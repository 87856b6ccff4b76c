"""What counts as progress: /ready says so, and the watchdog of systemd is fed only while there is some."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdd.base.ids import Incarnation, NodeName, ReplicaName
from pdd.daemon.node import Node
from pdd.daemon.readiness import readiness, standstill
from pdd.topology import model


class Clock:
    at_s = 100.0

    def now_s(self) -> float:
        return self.at_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def node(clock: Clock) -> Node:
    topology = model.Topology(
        version=1,
        cluster=model.Cluster(key_file=Path("key"), heartbeat_s=0.5, silence_s=3.0),
        model=model.Model(name="toy", path=Path("toy")),
        limits=model.Limits(step_s=30.0),
        nodes={NodeName("n"): model.Node(control_port=1)},
    )
    node = Node(topology, NodeName("n"), Incarnation("i"), clock)
    node.starting = False
    return node


def test_a_loop_that_turns_makes_progress(node: Node, clock: Clock) -> None:
    for _ in range(20):
        clock.at_s += 0.6
        assert standstill(node) is None
        node.load()
    assert readiness(node).ready


def test_a_late_loop_does_not(node: Node, clock: Clock) -> None:
    clock.at_s += 3.4
    assert standstill(node) is None
    clock.at_s += 0.6
    assert standstill(node) == "the node's event loop is late by 3.5 s"
    assert not readiness(node).ready
    node.load()
    assert standstill(node) is None


def test_neither_does_one_whose_executor_is_stuck(node: Node, clock: Clock) -> None:
    name = ReplicaName("n/0")
    node.replicas[name] = cast("Any", SimpleNamespace(name=name, role=model.Role.COLOCATED, step_started_s=clock.at_s))
    clock.at_s += 30.0
    node._last_beat_s = clock.at_s
    assert standstill(node) is None
    clock.at_s += 1.0
    assert standstill(node) == "replica n/0 has been in one step for 31 s"
    assert not readiness(node).ready
