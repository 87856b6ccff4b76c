"""All control links of a daemon: who dials whom, who is up, and who has fallen silent.

Each pair of nodes has one link. One side dials it, for ever; the other accepts. What a daemon learns of a peer's life
it learns here: `link_up` with an incarnation, then messages, then `link_down` exactly once. A node that connects anew
replaces its old link, whose `link_down` comes first, so that at most one link of a node is ever up.
"""

from __future__ import annotations

import asyncio
import errno
import random
from collections.abc import Collection, Mapping
from typing import Protocol

import msgspec
import structlog

from pdd.base.errors import AddressBusy, HandshakeRefused, RemoteProtocolError, TopologyInvalid
from pdd.base.ids import Incarnation, NodeName
from pdd.wire.admin import PeerRow
from pdd.wire.handshake import Handshake, RefusedByPeer, Side
from pdd.wire.link import Link
from pdd.wire.messages import Announce, Load, Message
from pdd.wire.tls import LinkTls

log = structlog.get_logger(__name__)

CONNECT_S = 5.0
HANDSHAKE_S = 5.0
CLOSE_S = 1.0
"""How long `close` waits for peers to take what was sent."""
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
SETTLED_S = 5.0
"""After a link that lived this long the backoff starts over."""
MAX_HALF_OPEN = 64
"""Accepted connections that have not proved the key; the oldest gives way to the newest."""
MAX_UNSENT_BYTES = 16 * 1024 * 1024


class LinkUser(Protocol):
    """What the daemon makes of links. Called from the event loop; an exception closes the link that it came from."""

    def link_up(self, peer: NodeName, incarnation: Incarnation) -> None: ...

    def message(self, peer: NodeName, incarnation: Incarnation, message: Message) -> None: ...

    def link_down(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None: ...

    def load(self) -> Load:
        """The next heartbeat."""
        ...


class LinkCounters(msgspec.Struct):
    """Since the start."""

    reconnects: int = 0
    """Links that came up after an earlier one of the same node."""
    bad_handshakes: int = 0
    """Connections whose other end did not prove itself in time, or not at all, or was refused."""
    protocol_errors: int = 0
    """Authenticated links that were closed because of what the peer sent."""
    internal_errors: int = 0
    """Exceptions of this daemon's own callbacks."""
    half_open_evicted: int = 0


class _Peer(msgspec.Struct):
    address: tuple[str, int]
    dialed: bool
    link: Link | None = None
    """The one that is up: its link_up was called, its link_down was not."""
    state: str = "connecting"
    reason: str = ""
    replicas: tuple[str, ...] = ()
    links: int = 0


class Links:
    """`peers`: every other node and the address of its control port. `dial`: those that this node connects to; the
    others connect to it (the node that is earlier in the topology dials). Port 0 takes any free one. `tls`: None for
    links in clear; a node with it and one without refuse each other."""

    def __init__(
        self,
        *,
        node: NodeName,
        incarnation: Incarnation,
        cluster: str,
        key: bytes,
        host: str,
        port: int,
        peers: Mapping[NodeName, tuple[str, int]],
        dial: Collection[NodeName],
        heartbeat_s: float,
        silence_s: float,
        user: LinkUser,
        tls: LinkTls | None = None,
        handshake_s: float = HANDSHAKE_S,
        max_unsent_bytes: int = MAX_UNSENT_BYTES,
    ) -> None:
        self._node = node
        self._incarnation = incarnation
        self._cluster = cluster
        self._key = key
        self._host = host
        self._port = port
        self._heartbeat_s = heartbeat_s
        self._silence_s = silence_s
        self._user = user
        self._tls = tls
        self._handshake_s = handshake_s
        self._max_unsent_bytes = max_unsent_bytes
        self._peers = {
            name: _Peer(
                address=address, dialed=name in dial, reason="" if name in dial else f"waits for {name} to connect"
            )
            for name, address in peers.items()
        }
        self._may_dial_us = frozenset(peers) - frozenset(dial)
        self._connections: set[Link] = set()
        self._half_open: dict[Link, None] = {}
        self._server: asyncio.Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False
        self.counters = LinkCounters()

    async def start(self) -> None:
        """Listens and begins to dial. Raises AddressBusy, or TopologyInvalid when the address is not ours."""
        loop = asyncio.get_running_loop()
        try:
            self._server = await loop.create_server(self._accepted, self._host, self._port)
        except OSError as error:
            address = f"{self._host}:{self._port}"
            if error.errno == errno.EADDRINUSE:
                raise AddressBusy(
                    f"control port {address} of node {self._node} is taken by another process: stop that (is it this "
                    "node's daemon already?) or give the node another control_port in the topology"
                ) from error
            raise TopologyInvalid(f"node {self._node} cannot listen on {address}: {error.strerror or error}") from error
        self._tasks = [loop.create_task(self._dial(name)) for name, peer in self._peers.items() if peer.dialed]
        self._tasks.append(loop.create_task(self._beat()))

    @property
    def port(self) -> int:
        """Where it listens, once started."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def send(self, peer: NodeName, message: Message) -> bool:
        """False when no link to the peer is up: nothing was sent. True is no promise that it arrives. Never blocks and
        calls nobody back. Raises RequestTooLarge when the message fits no frame."""
        link = self._peers[peer].link
        return link is not None and link.send(message)

    def cut(self, peer: NodeName, reason: str) -> None:
        """Ends the link to a peer that is connected but not to be trusted; it may say hello again. `link_down` comes
        before this returns. Nothing happens when no link to it is up."""
        link = self._peers[peer].link
        if link is not None:
            link.end(reason)
            self._down(link)

    def rows(self) -> tuple[PeerRow, ...]:
        return tuple(self._row(name, peer) for name, peer in self._peers.items())

    async def close(self) -> None:
        """Lets what was sent go out, then closes all links (their `link_down` comes now) and the port."""
        self._closing = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()
        for link in tuple(self._connections):
            link.finish("this daemon is closing")
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._all_gone()
        except TimeoutError:
            for link in tuple(self._connections):
                link.abort()
            await self._all_gone()
        if self._server is not None:
            await self._server.wait_closed()

    # What a Link tells.

    def opened(self, link: Link) -> None:
        self._connections.add(link)
        if self._closing:
            link.end("this daemon is closing")
        elif link.target is None:
            self._half_open[link] = None
            if len(self._half_open) > MAX_HALF_OPEN:
                self.counters.half_open_evicted += 1
                oldest = next(iter(self._half_open))
                del self._half_open[oldest]
                oldest.end("too many connections at once that have not proved the key")

    def established(self, link: Link) -> None:
        self._half_open.pop(link, None)
        peer = self._peers[link.peer]
        if peer.link is not None:
            peer.link.end("replaced by a new link of the same node")
            self._down(peer.link)
        peer.link = link
        peer.links += 1
        self.counters.reconnects += peer.links > 1
        self._note(link.peer, "up", "")
        try:
            self._user.link_up(link.peer, link.incarnation)
        except Exception as error:
            self._failed(link, error)

    def received(self, link: Link, message: Message) -> None:
        if isinstance(message, Announce):
            self._peers[link.peer].replicas = tuple(replica.name for replica in message.replicas)
        try:
            self._user.message(link.peer, link.incarnation, message)
        except Exception as error:
            self._failed(link, error)

    def lost(self, link: Link) -> None:
        self._connections.discard(link)
        self._half_open.pop(link, None)
        if link.authenticated:
            self.counters.protocol_errors += isinstance(link.fault, RemoteProtocolError)
            self._down(link)
            return
        if link.fault is not None and not isinstance(link.fault, RefusedByPeer):
            self.counters.bad_handshakes += 1
        peer = self._peers.get(link.peer)
        if peer is not None and peer.link is None:
            self._note(link.peer, "refused" if isinstance(link.fault, HandshakeRefused) else "connecting", link.reason)
        elif link.fault is not None:
            log.warning("bad_handshake", host=link.remote_host, reason=link.reason)
            for name in self._may_dial_us:  # one of those at this address, perhaps
                peer = self._peers[name]
                if peer.link is None and peer.address[0] == link.remote_host:
                    self._note(name, "connecting", f"a connection from its address failed: {link.reason}")

    # Inside.

    def _down(self, link: Link) -> None:
        peer = self._peers[link.peer]
        if peer.link is not link:
            return  # told already, when another took its place
        peer.link, peer.replicas = None, ()
        try:
            self._user.link_down(link.peer, link.incarnation, link.reason)
        except Exception as error:
            self._failed(link, error)
        if peer.link is None:
            self._note(link.peer, "connecting", link.reason)

    def _failed(self, link: Link, error: Exception) -> None:
        self.counters.internal_errors += 1
        log.error("link_callback_failed", peer=link.peer, exc_info=error)
        link.end(f"internal error of node {self._node}: {type(error).__name__}: {error}")

    def _accepted(self) -> Link:
        return self._new_link(Side.ACCEPTOR, self._may_dial_us, None)

    def _new_link(self, side: Side, expected: Collection[NodeName], target: NodeName | None) -> Link:
        handshake = Handshake(
            side=side,
            node=self._node,
            incarnation=self._incarnation,
            cluster=self._cluster,
            key=self._key,
            expected=expected,
        )
        return Link(
            self,
            handshake,
            target=target,
            tls=None if self._tls is None else self._tls.end(side),
            handshake_s=self._handshake_s,
            max_unsent_bytes=self._max_unsent_bytes,
        )

    async def _dial(self, name: NodeName) -> None:
        loop = asyncio.get_running_loop()
        host, port = self._peers[name].address
        backoff_s = FIRST_BACKOFF_S
        while True:
            start_s = loop.time()
            try:
                async with asyncio.timeout(CONNECT_S):
                    _, link = await loop.create_connection(
                        lambda: self._new_link(Side.DIALER, (name,), name), host, port
                    )
                await link.gone.wait()
            except TimeoutError:
                self._note(name, "connecting", f"{host}:{port} does not answer")
            except OSError as error:
                self._note(name, "connecting", f"cannot connect to {host}:{port}: {error.strerror or error}")
            if loop.time() - start_s > SETTLED_S:
                backoff_s = FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # noqa: S311 - spreads load, hides nothing
            backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _beat(self) -> None:
        """Heartbeats, and the end of links that give none. Silence is measured in beats of our own: when this process
        was stopped or starved, what the peers sent meanwhile waits to be read, and one beat condemns nobody."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            links = [peer.link for peer in self._peers.values() if peer.link is not None]
            for link in links:
                link.quiet_beats += 1
                if link.quiet_beats * self._heartbeat_s > self._silence_s:
                    link.end(f"silent for {self._silence_s:g} s")
            try:
                load = self._user.load()
                for link in links:
                    link.send(load)
            except Exception as error:
                self.counters.internal_errors += 1
                log.error("heartbeat_failed", exc_info=error)

    async def _all_gone(self) -> None:
        while self._connections:
            await next(iter(self._connections)).gone.wait()

    def _note(self, name: NodeName, state: str, reason: str) -> None:
        peer = self._peers[name]
        if (state, reason) != (peer.state, peer.reason):
            log.info("link", peer=name, state=state, reason=reason)
        peer.state, peer.reason = state, reason

    def _row(self, name: NodeName, peer: _Peer) -> PeerRow:
        link = peer.link
        return PeerRow(
            node=name,
            address=f"{peer.address[0]}:{peer.address[1]}",
            state=peer.state,
            reason=peer.reason,
            incarnation=link.incarnation if link else "",
            silent_s=asyncio.get_running_loop().time() - link.heard_s if link else 0.0,
            replicas=peer.replicas,
            links=peer.links,
            way="",
        )
