"""Who is at the other end of a new link: mutual proof of the cluster key, before anything else is listened to.

    dialer                                acceptor
      Hello  ------------------------------>        own name, cluster, version, incarnation, 32 fresh random bytes
      <------------------------------  Hello
      Proof  ------------------------------>        HMAC-SHA256(key, side | dialer's hello | acceptor's hello)
      <------------------------------  Proof

Both send at once; the order above is not needed. A side stands in its own proof, so a reflected one is wrong; both
nonces stand in both proofs, so a recorded one is wrong. After a Refusal the link is closed. Over TLS (tls.py) both
certificates stand in both proofs as well, so whoever ends TLS in between needs the cluster key, too (the idea of
tls-server-end-point, RFC 5929). Without TLS the link is authenticated at its start and not encrypted: whoever can alter
packets between two nodes can alter messages.

Sans-I/O: `receive` takes a message and returns those to send. The shape of Hello is the same in all protocol versions,
so that two versions can tell each other.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Collection
from enum import StrEnum

from pdd.base.errors import HandshakeRefused, RemoteProtocolError
from pdd.base.ids import Incarnation, NodeName
from pdd.wire.messages import PROTOCOL, Hello, Message, Proof, Refusal

NONCE_BYTES = 32
MAX_REASON_CHARACTERS = 500
_DOMAIN = b"pdd control link\0"
_INCARNATION = re.compile(r"[0-9a-f]{16}")


class Side(StrEnum):
    DIALER = "dialer"
    ACCEPTOR = "acceptor"


class RefusalCode(StrEnum):
    PROTOCOL = "protocol"
    CLUSTER = "cluster"
    OWN_NAME = "own_name"
    UNEXPECTED_NODE = "unexpected_node"
    MALFORMED = "malformed"
    WRONG_KEY = "wrong_key"


class Refused(HandshakeRefused):
    """We refuse the peer: send `refusal`, then close."""

    def __init__(self, code: RefusalCode, reason: str) -> None:
        super().__init__(reason)
        self.refusal = Refusal(code=code, reason=reason)


class RefusedByPeer(HandshakeRefused):
    """The peer refuses us: close."""


class Handshake:
    """One link's handshake on one side. `expected`: the nodes that may be at the other end."""

    def __init__(
        self,
        *,
        side: Side,
        node: NodeName,
        incarnation: Incarnation,
        cluster: str,
        key: bytes,
        expected: Collection[NodeName],
    ) -> None:
        self._side = side
        self._key = key
        self._expected = expected
        self.hello = Hello(
            protocol=PROTOCOL,
            cluster=cluster,
            node=node,
            incarnation=incarnation,
            nonce=secrets.token_bytes(NONCE_BYTES),
        )
        """What this side sends first."""
        self.peer: Hello | None = None
        """The peer's hello: a mere claim until `done`."""
        self.done = False
        self._certificates = (b"", b"")

    def bind(self, own: bytes, peer: bytes) -> None:
        """Over TLS, before anything is received: the certificates (DER) that the ends of this connection showed."""
        self._certificates = (own, peer)

    def receive(self, message: Message) -> list[Message]:
        """Returns what to send now. Raises Refused, RefusedByPeer or RemoteProtocolError; the link is then over."""
        if isinstance(message, Refusal):
            raise RefusedByPeer(f"{message.code[:40]}: {message.reason[:MAX_REASON_CHARACTERS]}")
        if isinstance(message, Hello) and self.peer is None:
            self._check(message)
            self.peer = message
            return [Proof(mac=self._mac(self._side, message))]
        if isinstance(message, Proof) and self.peer is not None and not self.done:
            other = Side.ACCEPTOR if self._side is Side.DIALER else Side.DIALER
            if not hmac.compare_digest(message.mac, self._mac(other, self.peer)):
                raise Refused(
                    RefusalCode.WRONG_KEY,
                    f"node {self.hello.node} and the node that calls itself {self.peer.node} have different cluster "
                    "keys (copy the same key file to both), or something between them ends their TLS",
                )
            self.done = True
            return []
        raise RemoteProtocolError(f"a {type(message).__name__} at a point of the handshake where none is due")

    def _check(self, hello: Hello) -> None:
        """Raises Refused; the reason names the fields that differ, with both values."""
        own = self.hello
        if hello.protocol != own.protocol:
            raise Refused(
                RefusalCode.PROTOCOL,
                f"protocol: {own.node} speaks {own.protocol}, you speak {hello.protocol}; run one version of pdd",
            )
        if hello.cluster != own.cluster:
            raise Refused(
                RefusalCode.CLUSTER, f"cluster: {own.node} is of {own.cluster!r}, you are of {hello.cluster[:80]!r}"
            )
        if hello.node == own.node:
            raise Refused(
                RefusalCode.OWN_NAME,
                f"node: both ends are {own.node!r}; two daemons run with one name, or an address leads back to itself",
            )
        if hello.node not in self._expected:
            raise Refused(
                RefusalCode.UNEXPECTED_NODE,
                f"node: {hello.node[:80]!r} is not whom {own.node} {self._awaits()}; compare both topology files",
            )
        if len(hello.nonce) != NONCE_BYTES or not _INCARNATION.fullmatch(hello.incarnation):
            raise Refused(RefusalCode.MALFORMED, f"nonce or incarnation: not {NONCE_BYTES} bytes and 16 hex digits")
        if hmac.compare_digest(hello.nonce, own.nonce):
            raise Refused(RefusalCode.MALFORMED, "nonce: my own came back")

    def _awaits(self) -> str:
        if self._side is Side.DIALER:
            return f"dialed ({', '.join(sorted(self._expected))})"
        return "is dialed by"  # whoever connects learns no names

    def _mac(self, side: Side, peer: Hello) -> bytes:
        own, other = (_canonical(self.hello), self._certificates[0]), (_canonical(peer), self._certificates[1])
        dialer, acceptor = (own, other) if self._side is Side.DIALER else (other, own)
        transcript = _DOMAIN + side.encode() + b"\0" + _joined(*dialer, *acceptor)
        return hmac.digest(self._key, transcript, hashlib.sha256)


def _canonical(hello: Hello) -> bytes:
    """Every field with its length before it, so that no two hellos have the same bytes."""
    fields = (str(hello.protocol).encode(), hello.cluster.encode(), hello.node.encode(), hello.incarnation.encode())
    return _joined(*fields, hello.nonce)


def _joined(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(4, "little") + field for field in fields)
