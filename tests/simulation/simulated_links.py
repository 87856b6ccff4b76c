"""Links between simulated daemons: frames wait until the simulation delivers them, in order within a direction.

The ends of a connection live apart, as over TCP: one is up before the other; one closes, and the other hears of it
after what it was still sent, or a part of that.

    opening --> up --> ending --> down          ending: closed by this side, which has yet to be told
                 `---------------/
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Collection, Iterator
from typing import Literal

from pdd.base.errors import RemoteProtocolError
from pdd.base.ids import Incarnation, NodeName
from pdd.wire.admin import PeerRow
from pdd.wire.codec import Decoder, encode
from pdd.wire.links import LinkUser
from pdd.wire.messages import Message


class End:
    """One side of a connection."""

    other: End

    def __init__(self, links: SimulatedLinks, random_: random.Random) -> None:
        self.links = links
        self.state: Literal["opening", "up", "ending", "down"] = "opening"
        self.reason = ""
        self.inbox: deque[tuple[str, bytes]] = deque()
        """Kind of message and frame; what the other side has sent."""
        self._random = random_

    @property
    def peer(self) -> SimulatedLinks:
        return self.other.links

    @property
    def closed(self) -> bool:
        return self.state in {"ending", "down"}

    def send(self, message: Message) -> bool:
        if self.state != "up":
            return False
        frame = encode(message)
        if not self.other.closed:
            self.other.inbox.append((type(message).__name__, frame))
        return True

    def close(self, state: Literal["ending", "down"], reason: str) -> None:
        """Nothing that it was sent is read any more; what it sent gets through in part."""
        if not self.closed:
            self.reason = reason
            self.inbox.clear()
            for _ in range(self._random.randint(0, len(self.other.inbox))):
                self.other.inbox.pop()
        self.state = state

    def open(self) -> None:
        self.links.established(self)

    def deliver(self) -> None:
        _, frame = self.inbox.popleft()
        decoder = Decoder()
        decoder.authenticated()
        try:
            (message,) = decoder.feed(frame)
        except RemoteProtocolError:
            if not self.peer.hostile:
                raise
            self.close("ending", "what came is no message")
            return
        self.links.user.message(self.peer.node, self.peer.incarnation, message)

    def lose(self) -> None:
        """The event loop tells that the connection is closed."""
        told = self.state != "opening"
        self.close("down", "the peer closed the link")
        if told:
            self.links.lost(self)


class SimulatedLinks:
    """Stands for wire.links.Links in one life of a daemon."""

    def __init__(
        self, node: NodeName, incarnation: Incarnation, others: Collection[NodeName], *, hostile: bool = False
    ) -> None:
        self.node = node
        self.incarnation = incarnation
        self.hostile = hostile
        """It may send what is no message."""
        self._others = others
        self.user: LinkUser
        self.ends: list[End] = []
        """Those that are not down."""
        self.up: dict[NodeName, End] = {}
        """Those whose link_up was told and whose link_down was not."""

    def connects(self, peer: NodeName) -> bool:
        """Whether a connection with that node is there or on its way."""
        return any(end.peer.node == peer for end in self.ends)

    def established(self, end: End) -> None:
        old = self.up.get(end.peer.node)
        if old is not None:
            old.close("ending", "replaced by a new link of the same node")
            self.lost(old)
        end.state = "up"
        self.up[end.peer.node] = end
        self.user.link_up(end.peer.node, end.peer.incarnation)

    def lost(self, end: End) -> None:
        peer = end.peer.node
        if self.up.get(peer) is end:
            del self.up[peer]
            self.user.link_down(peer, end.peer.incarnation, end.reason)

    def forget_closed(self) -> None:
        self.ends = [end for end in self.ends if end.state != "down"]

    def close(self, reason: str) -> None:
        for end in self.ends:
            end.close("down", reason)
            self.lost(end)
        self.ends = []

    def die(self) -> None:
        """The process is gone; nobody here is told."""
        for end in self.ends:
            end.close("down", "killed")
        self.ends, self.up = [], {}

    # What a node calls.

    def send(self, peer: NodeName, message: Message) -> bool:
        end = self._up(peer)
        return end is not None and end.send(message)

    def cut(self, peer: NodeName, reason: str) -> None:
        end = self._up(peer)
        if end is not None:
            end.close("ending", reason)
            self.lost(end)

    def _up(self, peer: NodeName) -> End | None:
        """As the real links do, raises KeyError for a node that is none of them."""
        if peer not in self._others:
            raise KeyError(peer)
        return self.up.get(peer)

    def rows(self) -> Iterator[PeerRow]:
        return iter(())


def connect(dialer: SimulatedLinks, acceptor: SimulatedLinks, random_: random.Random) -> tuple[End, End]:
    ends = End(dialer, random_), End(acceptor, random_)
    for end, other in (ends, ends[::-1]):
        end.other = other
        end.links.ends.append(end)
    return ends
