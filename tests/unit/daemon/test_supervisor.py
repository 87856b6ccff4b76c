"""A failed replica is taken down when nobody can write into its memory any more, and not before."""

from __future__ import annotations

import asyncio
import ctypes
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pdd.base.clock import MonotonicClock
from pdd.base.errors import PddError, ReplicaFailed
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon import supervisor
from pdd.daemon.node import Node
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.supervisor import Supervisor
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.loopback_port import LoopbackPort
from pdd.fabric.port import ProviderInfo
from pdd.lifecycle.request import GenerateRequest, SamplingParams
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology import model
from pdd.transfer.group import MessengerGroup
from pdd.transfer.messenger import Messenger
from pdd.wire import messages as wire

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=4, page_tokens=16, dtype="float32", num_pages=8)
SHAPE = KvShape(tp=1, num_kv_heads=1, layout=LAYOUT)
HERE, THERE = NodeName("decode0"), NodeName("prefill0")
DECODER, PREFILLER = ReplicaName("decode0/0"), ReplicaName("prefill0/0")


class Port(LoopbackPort):
    fences = True

    @property
    def info(self) -> ProviderInfo:
        return msgspec.structs.replace(super().info, fences=self.fences)


class Failing:
    """A decode replica whose executor is gone when `gone` is set, as its supervisor sees it."""

    def __init__(self, node: Node, *, fences: bool) -> None:
        config = model.Replica(role=model.Role.DECODE)
        self.arena = ctypes.create_string_buffer(LAYOUT.arena_bytes)
        port = Port(0, LoopbackFabric(0)._random, 16)
        port.fences = fences
        packed = SimpleNamespace(digest="m", config=SimpleNamespace(vocab_size=1 << 20))
        one = ReplicaSet(
            DECODER, config, cast("Any", packed), SHAPE,
            max_sequence_tokens=128, max_queue=4, clock=node.clock, work=asyncio.Event(),
        )  # fmt: skip
        messenger = Messenger(port, LAYOUT, ctypes.addressof(self.arena))
        one.open_fabric(cast("Any", [port]), MessengerGroup(SHAPE, [messenger]), [])
        self.sets = [one]
        self.node = node
        self.gone, self.stopped = asyncio.Event(), asyncio.Event()
        self.requests: dict[RequestId, Any] = {}
        self.left: list[str] = []
        """Requests that might still be written for when the memory went."""

    async def run(self) -> PddError:
        await self.gone.wait()
        error = ReplicaFailed("the executor is gone")
        self.sets[0].fail(error)
        return error

    async def stop(self) -> None:
        self.left = [record.machine.tell() for record in self.requests.values()]
        self.sets[0].close()
        self.stopped.set()

    def serve(self) -> None:
        """Up to a ticket that a prefiller has, and never answers."""
        incarnation = Incarnation("there")
        self.node.link_up(THERE, incarnation)
        ranks = (wire.RankInfo(rank=0, fabric_provider="loopback"),)
        info = wire.ReplicaInfo(
            name=PREFILLER, role="prefill", model_digest="m", shape=SHAPE, ranks=ranks, max_sequences=1
        )
        self.node.message(THERE, incarnation, wire.Announce(replicas=(info,)))
        request = GenerateRequest(
            id=RequestId("r"), prompt=tuple(range(100)), sampling=SamplingParams(max_tokens=1), timeout_s=60.0
        )
        self.node.message(THERE, incarnation, wire.Submit(replica=DECODER, request=request))
        self.requests = cast("Any", self.node.side_of(self.sets[0]).records)


def make_node() -> Node:
    topology = model.Topology(
        version=1,
        cluster=model.Cluster(key_file=Path("key")),
        model=model.Model(name="toy", path=Path("toy")),
        handoff=model.Handoff(local_prefill_tokens=0, lease_s=0.05),
        nodes={HERE: model.Node(control_port=1, replicas=(model.Replica(role=model.Role.DECODE),))},
    )
    node = Node(topology, HERE, Incarnation("here"), MonotonicClock())
    node.links = cast("Any", SimpleNamespace(send=lambda *_: True, cut=lambda *_: None))
    return node


@pytest.mark.parametrize("fences", [True, False])
async def test_its_memory_goes_when_nobody_can_write_there(fences: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "DRAIN_S", 0.0)
    node = make_node()
    replica = Failing(node, fences=fences)

    async def make() -> Any:
        return replica

    one = Supervisor(node, DECODER, make)
    await one.start()
    replica.serve()
    assert [str(record.machine.state) for record in replica.requests.values()] == ["prefilling"]
    life = asyncio.create_task(one.run())
    replica.gone.set()
    async with asyncio.timeout(20.0):
        await replica.stopped.wait()
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    assert replica.left == []
    [story] = node.stories.find((), "r", 0.0)
    assert [line.state for line in story.lines[-2:]] == ["draining", "failed"]


async def test_a_system_that_has_nothing_left_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_BACKOFF_S", 0.001)
    node = make_node()
    replica, again = Failing(node, fences=True), asyncio.Event()
    faults: list[OSError | None] = [
        None,
        OSError(errno.EMFILE, "Too many open files"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
        None,
    ]
    reasons: list[str] = []

    async def make() -> Any:
        reasons.append(node.down.get(DECODER, ""))
        if fault := faults.pop(0):
            raise fault
        if not faults:
            again.set()
        return replica

    one = Supervisor(node, DECODER, make)
    await one.start()
    life = asyncio.create_task(one.run())
    replica.gone.set()
    async with asyncio.timeout(20.0):
        await again.wait()
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    assert "the executor is gone" in reasons[1]
    assert "decode0/0 cannot start: Too many open files" in reasons[2]
    assert "decode0/0 cannot start: Cannot allocate memory" in reasons[3]
