"""Hostile bytes: only RemoteProtocolError escapes from the decoder and from the handshake."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdd.base.errors import HandshakeRefused, RemoteProtocolError
from pdd.base.ids import NodeName, new_incarnation
from pdd.wire.codec import MAX_FRAME_BYTES, Decoder, encode
from pdd.wire.handshake import Handshake, Side
from pdd.wire.messages import AnyMessage, Hello, Message, Proof, Refusal

TYPES: Sequence[type[Message]] = AnyMessage.__args__
json_like = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
field_names = sorted({name for kind in TYPES for name in kind.__struct_fields__})
almost_messages = st.builds(
    lambda kind, fields: msgspec.msgpack.encode({"type": kind.__name__, **fields}),
    st.sampled_from(TYPES),
    st.dictionaries(st.sampled_from(field_names), json_like, max_size=12),
)
bodies = st.binary(max_size=200) | almost_messages | json_like.map(msgspec.msgpack.encode)
frames = bodies.map(lambda body: len(body).to_bytes(4, "little") + body)


def drain(decoder: Decoder, data: bytes, step: int) -> list[Message]:
    return [message for start in range(0, len(data), step) for message in decoder.feed(data[start : start + step])]


@given(st.lists(frames | st.binary(max_size=100), max_size=4).map(b"".join), st.integers(1, 64), st.booleans())
def test_bytes_are_messages_or_a_protocol_error(data: bytes, step: int, authenticated: bool) -> None:
    decoder = Decoder()
    if authenticated:
        decoder.authenticated()
    try:
        messages = drain(decoder, data, step)
    except RemoteProtocolError:
        return
    assert all(type(message) in (TYPES if authenticated else (Hello, Proof, Refusal)) for message in messages)
    assert len(decoder._buffer) <= 4 + MAX_FRAME_BYTES


@given(st.data())
def test_a_damaged_message_is_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    hello = Hello(protocol=1, cluster="c", node=NodeName("a"), incarnation=new_incarnation(), nonce=b"n" * 32)
    stream = bytearray(encode(hello))
    for _ in range(data.draw(st.integers(1, 4))):
        stream[data.draw(st.integers(0, len(stream) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(RemoteProtocolError):
        drain(Decoder(), bytes(stream), len(stream))


hellos = st.builds(
    Hello,
    protocol=st.integers(-(2**63), 2**64 - 1) | st.just(1),
    cluster=st.text(max_size=4) | st.just("c"),
    node=st.sampled_from(["a", "b", "c"]),
    incarnation=st.text(max_size=16) | st.just("0" * 16),
    nonce=st.binary(min_size=31, max_size=33),
)
handshake_messages = (
    hellos | st.builds(Proof, mac=st.binary(max_size=40)) | st.builds(Refusal, code=st.text(), reason=st.text())
)


@given(st.lists(handshake_messages, max_size=5), st.sampled_from(Side))
def test_nobody_gets_in_without_the_key(messages: list[Message], side: Side) -> None:
    handshake = Handshake(
        side=side,
        node=NodeName("a"),
        incarnation=new_incarnation(),
        cluster="c",
        key=b"k" * 32,
        expected=(NodeName("b"),),
    )
    with contextlib.suppress(RemoteProtocolError, HandshakeRefused):
        for message in messages:
            handshake.receive(message)
    assert not handshake.done
