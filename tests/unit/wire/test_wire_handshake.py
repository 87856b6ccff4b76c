"""The handshake: two sides with one key come together, everybody else is told why not."""

from __future__ import annotations

import msgspec
import pytest

from pdd.base.errors import RemoteProtocolError
from pdd.base.ids import NodeName, RequestId, new_incarnation
from pdd.wire.handshake import Handshake, Refused, RefusedByPeer, Side
from pdd.wire.messages import PROTOCOL, Cancel, Hello, Proof, Refusal

KEY = b"k" * 32
A, B = NodeName("a"), NodeName("b")


def side(which: Side, **changes: object) -> Handshake:
    """The dialer is a, the acceptor b."""
    own, other = (A, B) if which is Side.DIALER else (B, A)
    options = {"node": own, "incarnation": new_incarnation(), "cluster": "test", "key": KEY, "expected": (other,)}
    return Handshake(side=which, **(options | changes))  # type: ignore[arg-type]


def test_two_sides_with_one_key() -> None:
    dialer, acceptor = side(Side.DIALER), side(Side.ACCEPTOR)
    (dialer_proof,) = dialer.receive(acceptor.hello)
    (acceptor_proof,) = acceptor.receive(dialer.hello)
    assert not dialer.done
    assert not acceptor.done
    assert dialer.receive(acceptor_proof) == acceptor.receive(dialer_proof) == []
    assert dialer.done
    assert acceptor.done
    assert dialer.peer == acceptor.hello
    assert acceptor.peer == dialer.hello


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"protocol": 99}, "protocol", [str(PROTOCOL), "99"]),
        ({"cluster": "prod"}, "cluster", ["'test'", "'prod'"]),
        ({"node": B}, "own_name", ["'b'"]),
        ({"node": NodeName("mallory")}, "unexpected_node", ["'mallory'", "b"]),
        ({"nonce": b"short"}, "malformed", ["nonce"]),
        ({"incarnation": "X" * 16}, "malformed", ["incarnation"]),
        ({"incarnation": "0" * 17}, "malformed", ["incarnation"]),
        ({"incarnation": "0" * 16 + "\n"}, "malformed", ["incarnation"]),
    ],
)
def test_refusals_name_the_fields_that_differ(changes: dict[str, object], code: str, words: list[str]) -> None:
    hello = msgspec.structs.replace(side(Side.DIALER).hello, **changes)
    acceptor = side(Side.ACCEPTOR)
    with pytest.raises(Refused) as caught:
        acceptor.receive(hello)
    assert caught.value.refusal.code == code
    assert all(word in caught.value.refusal.reason for word in words)
    assert not acceptor.done


def test_a_dialer_refuses_another_node_at_the_address() -> None:
    with pytest.raises(Refused, match=r"'c'.*dialed.*b"):
        side(Side.DIALER).receive(side(Side.ACCEPTOR, node=NodeName("c")).hello)


def test_endless_names_make_no_endless_reasons() -> None:
    hello = msgspec.structs.replace(side(Side.DIALER).hello, node=NodeName("x" * 60_000))
    with pytest.raises(Refused) as caught:
        side(Side.ACCEPTOR).receive(hello)
    assert len(caught.value.refusal.reason) < 500
    with pytest.raises(RefusedByPeer) as refused:
        side(Side.DIALER).receive(Refusal(code="c" * 9999, reason="r" * 9999))
    assert len(str(refused.value)) < 600


def test_another_key() -> None:
    dialer, acceptor = side(Side.DIALER, key=b"x" * 32), side(Side.ACCEPTOR)
    acceptor.receive(dialer.hello)
    with pytest.raises(Refused, match="cluster keys"):
        acceptor.receive(*dialer.receive(acceptor.hello))
    assert not acceptor.done


def test_a_proof_of_another_link_is_wrong() -> None:
    dialer, first, second = side(Side.DIALER), side(Side.ACCEPTOR), side(Side.ACCEPTOR)
    (proof,) = dialer.receive(first.hello)
    second.receive(dialer.hello)
    with pytest.raises(Refused):
        second.receive(proof)


def test_a_reflected_handshake_is_wrong() -> None:
    acceptor = side(Side.ACCEPTOR)
    with pytest.raises(Refused):
        acceptor.receive(acceptor.hello)
    # The same under the name of the other node: without the side in the proof this would pass.
    acceptor = side(Side.ACCEPTOR)
    claimed = msgspec.structs.replace(acceptor.hello, node=A)
    with pytest.raises(Refused, match="nonce"):
        acceptor.receive(claimed)
    acceptor = side(Side.ACCEPTOR)
    (own_proof,) = acceptor.receive(side(Side.DIALER).hello)
    with pytest.raises(Refused):
        acceptor.receive(own_proof)


def test_a_proof_covers_every_field_of_both_hellos() -> None:
    dialer = side(Side.DIALER)
    acceptor = side(Side.ACCEPTOR)
    (proof,) = dialer.receive(acceptor.hello)
    for field, value in {"incarnation": new_incarnation(), "nonce": b"z" * 32}.items():
        altered = Handshake(
            side=Side.ACCEPTOR, node=B, incarnation=acceptor.hello.incarnation, cluster="test", key=KEY, expected=(A,)
        )
        altered.hello = acceptor.hello
        altered.receive(msgspec.structs.replace(dialer.hello, **{field: value}))
        with pytest.raises(Refused):
            altered.receive(proof)


def test_messages_out_of_turn() -> None:
    hello = side(Side.DIALER).hello
    for messages in (
        [Proof(mac=b"m" * 32)],
        [hello, hello],
        [Cancel(request=RequestId("r"), stopped=True)],
        [hello, Cancel(request=RequestId("r"), stopped=True)],
    ):
        acceptor = side(Side.ACCEPTOR)
        for message in messages[:-1]:
            acceptor.receive(message)
        with pytest.raises(RemoteProtocolError):
            acceptor.receive(messages[-1])
        assert not acceptor.done


def test_a_refusal_ends_it() -> None:
    with pytest.raises(RefusedByPeer, match="cluster: not yours"):
        side(Side.DIALER).receive(Refusal(code="cluster", reason="not yours"))


def test_nonces_are_fresh() -> None:
    assert len({side(Side.DIALER).hello.nonce for _ in range(100)}) == 100


def test_hello_is_the_first_frame() -> None:
    assert isinstance(side(Side.DIALER).hello, Hello)
