"""A node of the topology that the test itself plays: it has the cluster's key, and says what it likes."""

from __future__ import annotations

import ctypes
import mmap
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from cluster import Cluster, eventually

from pdd.base.ids import Immediate, Incarnation, NodeName, PageId, ReplicaName, RequestId
from pdd.fabric.libfabric import LibfabricPort
from pdd.topology.load import load
from pdd.topology.model import Provider
from pdd.wire.links import Links
from pdd.wire.messages import Announce, Grant, Load, Message, PrefillRequest, RankInfo, ReplicaInfo

Kind = TypeVar("Kind", bound=Message)
REPLICA = ReplicaName("ghost0/0")
ARENA_BYTES = 8 * 2**20
"""As large as that of a toy decoder in these tests."""


class Ghost:
    """Decoder `ghost0`, with the shape that the true decoder announces. What it hears is in `heard`, oldest first."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.incarnation = Incarnation(secrets.token_hex(8))
        self.up: set[NodeName] = set()
        self.down: list[str] = []
        self.heard: list[Message] = []
        topology = load(cluster.file)
        self._info: dict[NodeName, Announce] = {}
        self.arena = mmap.mmap(-1, ARENA_BYTES)
        self.port = LibfabricPort.open(Provider.TCP, ("127.0.0.1",), spin_us=0, copies=False)
        self.target = self.port.register(ctypes.addressof(ctypes.c_char.from_buffer(self.arena)), ARENA_BYTES)
        me = NodeName("ghost0")
        names = list(topology.nodes)
        self.links = Links(
            node=me, incarnation=self.incarnation, cluster=topology.cluster.name, key=b"k" * 64, host="127.0.0.1",
            port=topology.nodes[me].control_port,
            peers={name: (node.host, node.control_port) for name, node in topology.nodes.items() if name != me},
            dial=names[names.index(me) + 1 :], heartbeat_s=0.2, silence_s=30, user=self,
        )  # fmt: skip

    def link_up(self, peer: NodeName, incarnation: Incarnation) -> None:
        self.up.add(peer)

    def message(self, peer: NodeName, incarnation: Incarnation, message: Message) -> None:
        if isinstance(message, Announce):
            self._info[peer] = message
        elif not isinstance(message, Load):
            self.heard.append(message)

    def link_down(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None:
        self.up.discard(peer)
        self.down.append(reason)

    def load(self) -> Load:
        return Load(sequence=0, replicas=())

    async def ready(self) -> None:
        async def known() -> bool:
            return {"prefill0", "decode0"} <= self._info.keys()

        await eventually(known, 10.0, lambda: f"links are up to {self.up}")

    def announce(self) -> None:
        """That there is a decoder here, like the one of decode0."""
        (info,) = self._info[NodeName("decode0")].replicas
        mine = ReplicaInfo(
            name=REPLICA, role="decode", model_digest=info.model_digest, shape=info.shape,
            ranks=(RankInfo(rank=0, fabric_provider=info.ranks[0].fabric_provider),), max_sequences=1,
        )  # fmt: skip
        self.links.send(NodeName("prefill0"), Announce(replicas=(mine,)))

    def grant(self) -> None:
        """The key to the arena, as a decoder gives it."""
        self.links.send(NodeName("prefill0"), Grant(replica=REPLICA, rank=0, address=self.target.address))

    def ticket(self, **changes: Any) -> PrefillRequest:
        """A good one: 40 tokens, three pages."""
        (info,) = self._info[NodeName("decode0")].replicas
        ticket = PrefillRequest(
            request=RequestId("ghost-1"), source_replica=ReplicaName("prefill0/0"), target_replica=REPLICA,
            target_incarnation=self.incarnation, shape_digest=info.shape.digest(), seed=0, prompt=tuple(range(40)),
            start_token=0, target_pages=tuple(map(PageId, (0, 1, 2))), immediates=(Immediate(0),),
            lease_s=5.0,
        )  # fmt: skip
        return msgspec.structs.replace(ticket, **changes)

    async def answer(self, kind: type[Kind]) -> Kind:
        """The next message of that kind; what came before it is forgotten."""
        found: list[Kind] = []

        async def came() -> bool:
            while self.heard and not found:
                message = self.heard.pop(0)
                found.extend([message] if isinstance(message, kind) else [])
            return bool(found)

        await eventually(came, 10.0, lambda: f"no {kind.__name__} came; links ended: {self.down}")
        return found[0]


@asynccontextmanager
async def ghost_of(cluster: Cluster) -> AsyncIterator[Ghost]:
    ghost = Ghost(cluster)
    await ghost.links.start()
    try:
        await ghost.ready()
        yield ghost
    finally:
        await ghost.links.close()
        ghost.port.close()
