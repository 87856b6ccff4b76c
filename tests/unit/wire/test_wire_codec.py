"""Frames: what goes in comes out, and what is no message is a RemoteProtocolError."""

from __future__ import annotations

import tracemalloc

import msgspec
import pytest

from pdd.base.errors import RemoteProtocolError, RequestTooLarge
from pdd.base.ids import Incarnation, NodeName, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import pack
from pdd.lifecycle.request import GenerateRequest, SamplingParams
from pdd.wire.codec import MAX_FRAME_BYTES, MAX_HANDSHAKE_FRAME_BYTES, Decoder, encode
from pdd.wire.messages import Cancel, Hello, Message, PrefillRequest, Proof, Refusal, Submit


def ticket(prompt: tuple[int, ...] = (1, 2, 3)) -> PrefillRequest:
    return PrefillRequest(
        request=RequestId("r"),
        source_replica=ReplicaName("a/0"),
        target_replica=ReplicaName("b/0"),
        target_incarnation=Incarnation("0" * 16),
        shape_digest="d",
        seed=7,
        prompt=prompt,
        start_token=0,
        target_pages=(PageId(7), PageId(0)),
        immediates=(pack(5, 6), pack(7, 8)),
        lease_s=1.5,
    )


HELLO = Hello(protocol=1, cluster="c", node=NodeName("a"), incarnation=Incarnation("0" * 16), nonce=b"n" * 32)
MESSAGES: list[Message] = [
    ticket(),
    Cancel(request=RequestId("é"), stopped=True),
    Submit(
        replica=ReplicaName("b/0"),
        request=GenerateRequest(
            id=RequestId("r"), prompt=(0, 2**40), sampling=SamplingParams(max_tokens=3, logit_bias={5: -1.0})
        ),
    ),
]


def open_decoder() -> Decoder:
    decoder = Decoder()
    decoder.authenticated()
    return decoder


def test_messages_survive_however_the_bytes_are_cut() -> None:
    stream = b"".join(map(encode, MESSAGES))
    for step in (1, 3, 7, len(stream)):
        decoder = open_decoder()
        received = [
            message for start in range(0, len(stream), step) for message in decoder.feed(stream[start : start + step])
        ]
        assert received == MESSAGES


def test_what_follows_the_handshake_in_the_same_bytes_is_read_by_the_new_rules() -> None:
    decoder = Decoder()
    big = ticket(prompt=tuple(range(100_000)))
    messages = decoder.feed(encode(HELLO) + encode(Proof(mac=b"m")) + encode(big))
    assert next(messages) == HELLO
    assert next(messages) == Proof(mac=b"m")
    decoder.authenticated()
    assert list(messages) == [big]


def test_the_handshake_admits_only_its_own_messages() -> None:
    with pytest.raises(RemoteProtocolError):
        list(Decoder().feed(encode(ticket())))


@pytest.mark.parametrize(
    ("decoder", "limit"), [(Decoder(), MAX_HANDSHAKE_FRAME_BYTES), (open_decoder(), MAX_FRAME_BYTES)]
)
def test_a_long_frame_is_refused_by_its_length_alone(decoder: Decoder, limit: int) -> None:
    with pytest.raises(RemoteProtocolError, match=str(limit)):
        list(decoder.feed((limit + 1).to_bytes(4, "little")))


def test_a_frame_of_the_greatest_length_passes() -> None:
    overhead = len(encode(Refusal(code="", reason="x" * 65536))) - 4 - 65536
    reason = "x" * (MAX_FRAME_BYTES - overhead)
    frame = encode(Refusal(code="", reason=reason))
    assert len(frame) == 4 + MAX_FRAME_BYTES
    assert list(open_decoder().feed(frame)) == [Refusal(code="", reason=reason)]
    with pytest.raises(RequestTooLarge, match="Refusal"):
        encode(Refusal(code="", reason=reason + "x"))


def frame(body: bytes) -> bytes:
    return len(body).to_bytes(4, "little") + body


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc0",
        b"\xc1",
        b"\x80",
        b"\x81\xa4type\xa4Nope",
        b"\x81\xa4type\xa5Hello",
        msgspec.msgpack.encode({"type": "Cancel", "request": "r", "stopped": True, "more": 1}),
        msgspec.msgpack.encode({"type": "Cancel", "request": 5, "stopped": True}),
        b"\x83\xa4type\xa6Cancel\xa7request\xa2\xff\xfe\xa7stopped\xc3",
        b"\x83\xa4type\xa6Submit\xa7replica\xa1r\xa7request\x81\xa1x" + b"\x91" * 100_000,
        b"\x91" * 100_000,
    ],
    ids=lambda body: body[:12].hex() or "empty",
)
def test_bodies_that_are_no_message(body: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        list(open_decoder().feed(frame(body)))


def test_a_claimed_array_takes_no_memory_before_its_elements_are_there() -> None:
    head = encode(ticket())[4:]
    body = head.replace(b"\xa6prompt\x93\x01\x02\x03", b"\xa6prompt\xdd\x10\x00\x00\x00")
    assert body != head
    decoder = open_decoder()
    tracemalloc.start()
    with pytest.raises(RemoteProtocolError):
        list(decoder.feed(frame(body)))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < 1_000_000
