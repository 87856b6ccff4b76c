"""What this daemon knows of the others: which replicas they run, how loaded those are, and which of theirs fit ours.

A peer is an incarnation: when a node comes back, nothing of its earlier life is believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId, is_of
from pdd.daemon.balance import Candidate
from pdd.daemon.paths import Paths
from pdd.wire.messages import Announce, Load, ReplicaInfo, ReplicaLoad


class Peer(msgspec.Struct):
    node: NodeName
    incarnation: Incarnation
    replicas: dict[ReplicaName, ReplicaInfo] = {}
    loads: dict[ReplicaName, ReplicaLoad] = {}
    sent: dict[ReplicaName, dict[RequestId, int]] = {}
    """What we have asked of them since the latest load came, which does not tell of it: requests and their tokens."""
    refused: dict[ReplicaName, str] = {}
    """Replicas that do not fit ours, and why."""


class PeerBook:
    """The peers whose links are up (and the node itself, which can be its own peer)."""

    def __init__(self) -> None:
        self._peers: dict[NodeName, Peer] = {}
        self.paths = Paths()
        self.seen_roles: set[str] = set()
        """Roles that some fitting peer has had since the start."""

    def up(self, node: NodeName, incarnation: Incarnation) -> None:
        self._peers[node] = Peer(node, incarnation)
        self.paths.forget(node, incarnation)

    def down(self, node: NodeName) -> None:
        self._peers.pop(node, None)

    def announce(self, node: NodeName, message: Announce) -> Peer:
        """Replaces what was known of its replicas. Of another node's it is not believed."""
        peer = self._peers[node]
        peer.replicas = {info.name: info for info in message.replicas if is_of(info.name, node)}
        peer.refused = {}
        return peer

    def load(self, node: NodeName, message: Load) -> None:
        peer = self._peers[node]
        peer.loads = {load.name: load for load in message.replicas}
        peer.sent = {}

    def sent(self, replica: ReplicaName, request: RequestId, num_tokens: int) -> None:
        """A replica was asked to decode it, or to prefill so much of it."""
        if peer := self.owner(replica):
            peer.sent.setdefault(replica, {})[request] = num_tokens

    def unsent(self, replica: ReplicaName, request: RequestId) -> None:
        """It has ended there."""
        if peer := self.owner(replica):
            peer.sent.get(replica, {}).pop(request, None)

    def known(self, node: NodeName) -> Peer:
        """One whose link is up: whoever sends us messages is."""
        return self._peers[node]

    def get(self, node: NodeName) -> Peer | None:
        return self._peers.get(node)

    def __iter__(self) -> Iterator[Peer]:
        return iter(self._peers.values())

    def owner(self, replica: ReplicaName) -> Peer | None:
        """The peer that runs a replica; None when it is not up."""
        return next((peer for peer in self._peers.values() if replica in peer.replicas), None)

    def candidates(self, roles: frozenset[str]) -> list[Candidate]:
        """Replicas of these roles that are up, fit and are ready for work."""
        return [
            _candidate(info, peer.loads.get(info.name), peer.sent.get(info.name, {}))
            for peer in self._peers.values()
            for info in peer.replicas.values()
            if info.role in roles and info.name not in peer.refused and _ready(peer.loads.get(info.name))
        ]


def _ready(load: ReplicaLoad | None) -> bool:
    return load is None or load.ready  # announced, but the first heartbeat is still to come


def _candidate(info: ReplicaInfo, load: ReplicaLoad | None, sent: Mapping[RequestId, int]) -> Candidate:
    layout = info.shape.layout
    num_sent_pages = sum(map(layout.num_pages_for, sent.values()))
    return Candidate(
        name=info.name,
        num_tokens=layout.num_pages * layout.page_tokens,
        page_tokens=layout.page_tokens,
        free_pages=max((load.free_pages if load else layout.num_pages) - num_sent_pages, 0),
        num_queued=(load.num_queued if load else 0) + len(sent),
        num_running=load.num_running if load else 0,
        queued_tokens=(load.queued_tokens if load else 0) + sum(sent.values()),
        max_sequences=info.max_sequences,
        late=load is not None and load.late,
    )
