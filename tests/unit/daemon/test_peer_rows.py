"""What `pdctl peers` is told of a peer: how pages go to it, and why its replicas do not fit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdd.base.ids import Incarnation, NodeName, ReplicaName
from pdd.daemon.node import Node
from pdd.daemon.peers import PeerBook
from pdd.daemon.report import answer
from pdd.fabric.port import PeerInfo
from pdd.topology.model import Role
from pdd.wire.admin import AdminRequest, PeerRow, Peers

PEER, THERE = NodeName("peer"), Incarnation("there")
COPY = PeerInfo(copies=True, num_paths=4, num_open=0)
ALL, SOME = (PeerInfo(copies=False, num_paths=2, num_open=number) for number in (2, 1))


def row(reason: str = "") -> PeerRow:
    return PeerRow(
        node=PEER, address="127.0.0.1:1", state="up", reason=reason, incarnation=THERE, silent_s=0.0, replicas=(),
        links=1, way="",
    )  # fmt: skip


def replica(role: Role, *ways: PeerInfo, failure: object = None) -> Any:
    def ways_to(peer: Incarnation) -> list[PeerInfo]:
        assert failure is None, "the ports of a failed set are closed"
        return [*ways] if peer == THERE else []

    return SimpleNamespace(role=role, failure=failure, messenger=SimpleNamespace(ways=ways_to))


async def told(*replicas: Any, up: bool = True, refused: str = "", reason: str = "") -> PeerRow:
    peers = PeerBook()
    if up:
        peers.up(PEER, THERE)
        next(iter(peers)).refused |= {ReplicaName("peer/0"): refused} if refused else {}
    node = SimpleNamespace(
        links=SimpleNamespace(rows=lambda: iter([row(reason)])), peers=peers, replicas=dict(enumerate(replicas))
    )
    found = await answer(cast("Node", node), AdminRequest(command="peers"))
    assert isinstance(found, Peers)
    return found.peers[0]


@pytest.mark.parametrize(
    ("replicas", "way"),
    [
        ([], ""),
        ([replica(Role.PREFILL)], ""),
        ([replica(Role.PREFILL, COPY, COPY)], "copy"),
        ([replica(Role.PREFILL, ALL, ALL)], "2 of 2 paths"),
        ([replica(Role.PREFILL, ALL, SOME), replica(Role.PREFILL, ALL)], "1 of 2 paths, 2 of 2 paths"),
        ([replica(Role.DECODE, COPY)], ""),
        ([replica(Role.PREFILL, COPY, failure="gone"), replica(Role.PREFILL, SOME)], "1 of 2 paths"),
    ],
)
async def test_each_way_that_pages_go_is_told_once(replicas: list[Any], way: str) -> None:
    assert (await told(*replicas)).way == way


async def test_a_peer_that_is_down_keeps_the_reason_of_its_link() -> None:
    shown = await told(replica(Role.PREFILL), up=False, reason="silent for 3 s")
    assert (shown.reason, shown.way) == ("silent for 3 s", "")
    assert (await told(reason="refused")).reason == "refused"


async def test_replicas_that_do_not_fit_say_why() -> None:
    assert (await told(refused="page_tokens: 16 and 24")).reason == "peer/0: page_tokens: 16 and 24"
