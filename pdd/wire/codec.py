"""Messages to bytes and back: the first thing that a peer's bytes meet, so nothing in here trusts them.

A frame is 4 bytes of length (little endian) and as many bytes of msgpack, a tagged struct of messages.py:

    | length (u32) | msgpack of one message | length | ...

Whatever bytes come, a Decoder yields messages or raises RemoteProtocolError, and holds no more than one frame of them.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from pdd.base.errors import RemoteProtocolError, RequestTooLarge
from pdd.wire.messages import AnyMessage, Hello, Message, Proof, Refusal

MAX_FRAME_BYTES = 4 * 1024 * 1024
"""A ticket for 800 000 tokens fits."""
MAX_HANDSHAKE_FRAME_BYTES = 64 * 1024
"""Before the peer has proved that it holds the key."""

_LENGTH_BYTES = 4
_TLS_RECORDS = (b"\x16\x03", b"\x15\x03")
"""How a handshake message and an alert of TLS begin (RFC 8446, 5.1)."""
_encoder = msgspec.msgpack.Encoder()
_any_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(AnyMessage)
_handshake_message: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Hello | Proof | Refusal)


def encode(message: Message) -> bytes:
    """One frame. Raises RequestTooLarge when no peer would take it."""
    body = _encoder.encode(message)
    if len(body) > MAX_FRAME_BYTES:
        raise RequestTooLarge(
            f"a {type(message).__name__} of {len(body)} bytes is larger than a control link carries ({MAX_FRAME_BYTES})"
        )
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


class Decoder:
    """The receiving half of one link. It starts in the handshake, where only small handshake messages pass."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._max_frame_bytes = MAX_HANDSHAKE_FRAME_BYTES
        self._messages = _handshake_message

    def authenticated(self) -> None:
        """From here on every message passes, those whose bytes came together with the handshake's last included."""
        self._max_frame_bytes = MAX_FRAME_BYTES
        self._messages = _any_message

    def feed(self, data: bytes) -> Iterator[Message]:
        """Takes bytes; the iterator decodes message by message, so `authenticated` may be called between two.

        What the iterator was not asked for stays buffered. Raises RemoteProtocolError while iterating; the link is
        then beyond repair.
        """
        self._buffer += data
        return self._decode()

    def _decode(self) -> Iterator[Message]:
        while len(self._buffer) >= _LENGTH_BYTES:
            num_bytes = int.from_bytes(self._buffer[:_LENGTH_BYTES], "little")
            if num_bytes > self._max_frame_bytes:
                if self._buffer.startswith(_TLS_RECORDS):
                    raise RemoteProtocolError("the other end speaks TLS: give both nodes `cluster.tls`, or neither")
                raise RemoteProtocolError(f"a frame of {num_bytes} bytes; at most {self._max_frame_bytes} are taken")
            end = _LENGTH_BYTES + num_bytes
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_LENGTH_BYTES:end])
            del self._buffer[:end]
            yield self._decode_body(body)

    def _decode_body(self, body: bytes) -> Message:
        try:
            return self._messages.decode(body)
        except (ValueError, RecursionError, OverflowError) as error:
            # msgspec's errors are ValueErrors. They name the field and what was wrong with it, never its content.
            raise RemoteProtocolError(f"a frame of {len(body)} bytes is no message: {error}") from error
