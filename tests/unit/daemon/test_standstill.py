"""What counts as progress: /ready says so, and the watchdog of systemd is fed only while there is some."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pdd.base.ids import Incarnation, NodeName, ReplicaName
from pdd.daemon.node import Node
from pdd.daemon.peers import PeerBook
from pdd.daemon.readiness import readiness, standstill
from pdd.daemon.replica_set import Asked, ReplicaSet
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology import model
from pdd.wire import messages as wire


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


async def test_peers_hear_of_a_replica_that_may_be_stuck(clock: Clock) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_tokens=16, dtype="float32", num_pages=4)
    one = ReplicaSet(
        ReplicaName("n/0"), model.Replica(role=model.Role.PREFILL), cast("Any", None),
        KvShape(tp=1, num_kv_heads=1, layout=layout),
        max_sequence_tokens=16, max_queue=1, clock=clock, work=asyncio.Event(),
    )  # fmt: skip
    one.asked, one.asked_at_s = Asked("step 1", "step_s", 30.0), clock.at_s
    clock.at_s += 3.0
    assert not one.load(draining=False, silence_s=3.0).late
    clock.at_s += 1.0
    assert one.load(draining=False, silence_s=3.0).late
    one.asked = None
    assert not one.load(draining=False, silence_s=3.0).late
    peers = PeerBook()
    peers.up(NodeName("n"), Incarnation("i"))
    info = wire.ReplicaInfo(name=one.name, role=one.role, model_digest="", shape=one.shape, ranks=(), max_sequences=1)
    peers.announce(NodeName("n"), wire.Announce(replicas=(info,)))
    for late in (True, False):
        load = msgspec.structs.replace(one.load(draining=False, silence_s=3.0), late=late)
        peers.load(NodeName("n"), wire.Load(sequence=1, replicas=(load,)))
        assert [it.late for it in peers.candidates(frozenset({one.role.value}))] == [late]


@pytest.mark.parametrize("limit_s", [10.0, 30.0])
def test_neither_does_one_whose_executor_is_stuck(node: Node, clock: Clock, limit_s: float) -> None:
    name, asked = ReplicaName("n/0"), Asked("a step, or nothing", "step_s", limit_s)
    replica = SimpleNamespace(name=name, role=model.Role.COLOCATED, asked=asked, silent_s=limit_s)
    node.replicas[name] = cast("Any", replica)
    assert standstill(node) is None
    replica.silent_s += 1.0
    assert standstill(node) == f"an executor of n/0 has not answered for {limit_s + 1:.0f} s"
    assert not readiness(node).ready
    replica.asked = None
    assert standstill(node) is None
