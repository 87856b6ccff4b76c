"""One control link: a TCP connection between two daemons, from its first byte to its last, over TLS where it has it.

A Link is an asyncio protocol without any task of its own. Its owner (links.py) hears of it, in this order: `opened`,
`established` once the handshake is done, `received` for each message, `lost` exactly once.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Protocol, cast

from pdd.base.errors import HandshakeRefused, PddError, RemoteProtocolError
from pdd.base.ids import Incarnation, NodeName
from pdd.wire.codec import Decoder, encode
from pdd.wire.handshake import Handshake, Refused
from pdd.wire.messages import Hello, Message, Proof, Refusal
from pdd.wire.tls import Tls, explained, speaks_no_tls


class LinkOwner(Protocol):
    def opened(self, link: Link) -> None:
        """Connected, not authenticated."""
        ...

    def established(self, link: Link) -> None:
        """The peer has proved that it has the key."""
        ...

    def received(self, link: Link, message: Message) -> None: ...

    def lost(self, link: Link) -> None:
        """The connection is closed; `link.reason` and `link.fault` say why."""
        ...


class Link(asyncio.Protocol):
    """`target`: the node that was dialed; None for an accepted connection. `tls`: None for a link in clear."""

    def __init__(
        self,
        owner: LinkOwner,
        handshake: Handshake,
        *,
        target: NodeName | None,
        tls: Tls | None,
        handshake_s: float,
        max_unsent_bytes: int,
    ) -> None:
        self._owner = owner
        self._handshake = handshake
        self._handshake_s = handshake_s
        self._max_unsent_bytes = max_unsent_bytes
        self._tls = tls
        self._decoder = Decoder()
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._transport: asyncio.Transport | None = None
        self.target = target
        self.remote_host = ""
        """The address that the connection came from or went to."""
        self.reason = ""
        """Why the link ends; the first reason counts."""
        self.fault: PddError | None = None
        """The offence that it ends for, where there is one."""
        self.heard_s = self._loop.time()
        """When the peer last sent something."""
        self.quiet_beats = 0
        """Heartbeats of ours since then."""
        self.gone = asyncio.Event()
        """Set after `lost`."""

    @property
    def peer(self) -> NodeName:
        """Who is at the other end. Before `authenticated` no more than a claim, or what was dialed, or empty."""
        hello = self._handshake.peer
        return hello.node if hello else self.target or NodeName("")

    @property
    def incarnation(self) -> Incarnation:
        """Meaningful once `authenticated`."""
        hello = self._handshake.peer
        return hello.incarnation if hello else Incarnation("")

    @property
    def authenticated(self) -> bool:
        return self._handshake.done

    @property
    def ending(self) -> bool:
        return bool(self.reason)

    def send(self, message: Message) -> bool:
        """False when the link is not up, or ends now because the peer leaves too much unread."""
        if not self.authenticated or self.ending:
            return False
        return self._write(message)

    def end(self, reason: str, fault: PddError | None = None) -> None:
        """Closes at once, unsent bytes are dropped. `lost` follows from the event loop, never from inside the call."""
        if self._transport is not None and not self.ending:
            self.reason, self.fault = reason, fault
            self._transport.abort()

    def finish(self, reason: str, fault: PddError | None = None) -> None:
        """Closes once what was sent is out, or after `handshake_s` at the latest."""
        if self._transport is not None and not self.ending:
            self.reason, self.fault = reason, fault
            self._start_timer()
            self._transport.close()

    def abort(self) -> None:
        """Cuts short what `finish` waits for."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # its loop has set TCP_NODELAY
        self.remote_host = str((transport.get_extra_info("peername") or ("",))[0])
        self._start_timer()
        if self._tls is None:
            self._write(self._handshake.hello)
        elif self.target is not None:
            self._read_tls(b"")
        self._owner.opened(self)

    def data_received(self, data: bytes) -> None:
        self.heard_s, self.quiet_beats = self._loop.time(), 0
        try:
            for message in self._decoder.feed(data if self._tls is None else self._read_tls(data)):
                self._take(message)
                if self.ending:
                    return
        except Refused as refused:
            self._write(refused.refusal)
            self.finish(f"refused: {refused}", refused)
        except ssl.SSLError as error:
            self._tls_failed(error)
        except PddError as error:
            self.end(str(error), error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reason = self.reason or (f"connection lost: {exc}" if exc else "the peer closed the link")
        self._stop_timer()
        self._transport = None
        self._owner.lost(self)
        self.gone.set()

    def _take(self, message: Message) -> None:
        if self.authenticated:
            if isinstance(message, Hello | Proof | Refusal):
                raise RemoteProtocolError(f"a {type(message).__name__} after the handshake")
            self._owner.received(self, message)
            return
        for answer in self._handshake.receive(message):
            self._write(answer)
        if self.authenticated:
            self._stop_timer()
            self._decoder.authenticated()
            self._owner.established(self)

    def _read_tls(self, data: bytes) -> bytes:
        """What the peer sent in these bytes. Raises ssl.SSLError; then an alert is on its way to the peer."""
        assert self._tls is not None
        assert self._transport is not None
        was_up = self._tls.up
        try:
            return self._tls.receive(data)
        finally:
            self._transport.write(self._tls.outgoing())
            if self._tls.up and not was_up:
                self._handshake.bind(self._tls.certificate, self._tls.peer_certificate)
                self._write(self._handshake.hello)

    def _tls_failed(self, error: ssl.SSLError) -> None:
        assert self._tls is not None
        assert self._transport is not None
        text = explained(error, self._tls.authority)
        if speaks_no_tls(error):  # so it cannot read the alert, but this
            self._transport.write(encode(Refusal(code="tls", reason="this node wants TLS: give both `cluster.tls`")))
        self.finish(text, RemoteProtocolError(text) if self.authenticated else HandshakeRefused(text))

    def _write(self, message: Message) -> bool:
        assert self._transport is not None
        frame = encode(message)
        self._transport.write(frame if self._tls is None else self._tls.send(frame))
        unsent_bytes = self._transport.get_write_buffer_size()
        if unsent_bytes > self._max_unsent_bytes:
            self.end(f"the peer does not read: {unsent_bytes} bytes wait for it")
            return False
        return True

    def _start_timer(self) -> None:
        self._stop_timer()
        self._timer = self._loop.call_later(self._handshake_s, self._out_of_time)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _out_of_time(self) -> None:
        reason = f"no handshake within {self._handshake_s:g} s"
        self.end(reason, RemoteProtocolError(reason))
        self.abort()
