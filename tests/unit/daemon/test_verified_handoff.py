"""`handoff.verify: pages`: nothing is used before both sides have hashed it, and nothing is left when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pdd.base.clock import MonotonicClock
from pdd.base.ids import Immediate, Incarnation, NodeName, ReplicaName, RequestId
from pdd.daemon.decode import DecodeSide
from pdd.daemon.metrics import Metrics
from pdd.daemon.peers import PeerBook
from pdd.daemon.prefill import PrefillSide
from pdd.daemon.replica_set import ReplicaSet
from pdd.daemon.side import Control
from pdd.daemon.stories import Stories
from pdd.lifecycle.request import GenerateRequest, SamplingParams, TokenOutput
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape
from pdd.topology.model import Handoff, Replica, Role, Verify
from pdd.transfer.events import Arrived, Sent
from pdd.wire import messages as wire

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=4, page_tokens=16, dtype="float32", num_pages=64)
SHAPE = KvShape(tp=1, num_kv_heads=1, layout=LAYOUT)
HERE, THERE = Incarnation("here"), Incarnation("there")
PEER, PREFILLER, DECODER = NodeName("peer"), ReplicaName("peer/0"), ReplicaName("peer/1")
REQUEST, IMMEDIATE = RequestId("r"), Immediate(7)
PROMPT = tuple(range(100))


class Messengers:
    """What the sides ask of a set's messenger, written down."""

    fences = True

    def __init__(self) -> None:
        self.calls: list[str] = []

    def arm(self, *_: object) -> tuple[Immediate, ...]:
        self.calls.append("arm")
        return (IMMEDIATE,)

    def arrived(self, _: RequestId) -> tuple[int, int]:
        return 14, 14

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.calls.append(name)


class FakeSet(ReplicaSet):
    """Hashes when it is told to."""

    def __init__(self, name: ReplicaName, role: Role) -> None:
        super().__init__(
            name,
            Replica(role=role),
            cast("Any", SimpleNamespace(digest="m", config=SimpleNamespace(vocab_size=1 << 20))),
            SHAPE,
            max_sequence_tokens=1024,
            max_queue=4,
            clock=MonotonicClock(),
            work=asyncio.Event(),
        )
        self.hashed: list[Callable[[tuple[int, ...]], None]] = []
        self.fake = Messengers()

    @property
    def messenger(self) -> Any:
        return self.fake

    def poll(self) -> None:
        """Events come from the tests."""

    def hash_pages(self, digests: object, then: Callable[[tuple[int, ...]], None]) -> None:
        self.hashed.append(then)


class World:
    def __init__(self, role: Role) -> None:
        self.sent: list[wire.Message] = []
        self.metrics = Metrics()
        peers = PeerBook()
        peers.up(PEER, THERE)
        theirs = PREFILLER if role is Role.DECODE else DECODER
        other = Role.PREFILL if role is Role.DECODE else Role.DECODE
        info = wire.ReplicaInfo(
            name=theirs, role=other, model_digest="m", shape=SHAPE, ranks=(), max_sequences=4,
        )  # fmt: skip
        peers.announce(PEER, wire.Announce(replicas=(info,)))
        self.control = Control(
            clock=MonotonicClock(),
            metrics=self.metrics,
            stories=Stories(),
            peers=peers,
            incarnation=HERE,
            send=self.send,
            fence=lambda *_: None,
            pair=lambda *_: None,
        )
        self.replica = FakeSet(DECODER if role is Role.DECODE else PREFILLER, role)

    def send(self, _: NodeName, message: wire.Message) -> bool:
        self.sent.append(message)
        return True

    def kinds(self) -> list[str]:
        return [type(message).__name__ for message in self.sent]

    def settled(self) -> bool:
        pool = self.replica.pool
        return pool.check() == [] and pool.num_owned == pool.num_quarantined == 0


class Decoder(World):
    """One request whose pages have all arrived and are being hashed."""

    def __init__(self) -> None:
        super().__init__(Role.DECODE)
        policy = Handoff(local_prefill_tokens=0, verify=Verify.PAGES)
        self.side = self.replica.user = DecodeSide(self.control, self.replica, policy, timeout_s=60.0)
        self.outputs: list[TokenOutput] = []
        self.side.submit(
            GenerateRequest(id=REQUEST, prompt=PROMPT, sampling=SamplingParams(max_tokens=4)), self.outputs.append
        )
        self.arrive()

    def arrive(self) -> None:
        self.side.transferred(
            Arrived(request=REQUEST, immediate=IMMEDIATE, num_pieces=14, num_bytes=99, first_s=0.0, last_s=1.0)
        )

    def they_say(self, *digests: int) -> None:
        self.side.message(PEER, wire.PrefillDigests(request=REQUEST, immediate=IMMEDIATE, digests=digests))

    def we_find(self, *digests: int) -> None:
        self.replica.hashed.pop(0)(digests)

    @property
    def state(self) -> str:
        return str(self.side.records[REQUEST].machine.state)

    @property
    def num_computed(self) -> int:
        return self.side.records[REQUEST].num_computed

    def counted(self, outcome: str) -> float:
        return self.metrics.registry.get_sample_value("pdd:handoffs_total", {"outcome": outcome}) or 0.0


@pytest.mark.parametrize("ours_first", [True, False])
async def test_a_request_is_ready_once_both_have_found_the_same(ours_first: bool) -> None:
    it = Decoder()
    assert it.sent[0].verify  # type: ignore[attr-defined]
    tell: list[Callable[[], None]] = [lambda: it.we_find(1, 2), lambda: it.they_say(1, 2)]
    for one in tell[:: 1 if ours_first else -1]:
        assert it.state == "prefilling"
        one()
    assert (it.state, it.num_computed) == ("ready", 99)
    assert it.replica.scheduler.num_running == 1
    assert it.replica.fake.calls.count("forget") == 1


async def test_pages_that_differ_are_asked_for_again_and_then_computed_here() -> None:
    it = Decoder()
    it.we_find(1, 2)
    it.they_say(1, 3)
    assert it.counted("corrupt") == 1
    assert it.kinds() == ["PrefillRequest", "PrefillRequest"]
    assert it.state == "prefilling"
    it.arrive()
    it.they_say(5)
    it.we_find(6)
    assert it.counted("corrupt") == 2
    assert (it.state, it.num_computed) == ("ready", 0)  # recomputed, whatever is in the pages
    assert it.replica.pool.num_cached == 0
    assert it.counted("arrived") == 0
    assert it.replica.fake.calls.count("forget") == 2


async def test_a_client_that_leaves_meanwhile_waits_for_nobody() -> None:
    it = Decoder()
    it.side.cancel(REQUEST, "gone")
    assert REQUEST not in it.side.records
    assert it.settled()
    assert it.kinds() == ["PrefillRequest"]  # all has been sent: there is nothing to stop
    it.we_find(1)
    it.they_say(1)
    assert it.settled()


async def test_pages_whose_sender_is_gone_before_it_told_are_not_used() -> None:
    it = Decoder()
    it.we_find(1)
    it.control.peers.down(PEER)
    it.side.peer_down(PEER, THERE, "killed")
    assert (it.state, it.num_computed) == ("ready", 0)
    assert it.counted("arrived") == 0


async def test_digests_of_an_earlier_attempt_change_nothing() -> None:
    it = Decoder()
    it.we_find(1)
    it.they_say(2)
    late = it.side.records[REQUEST].handoff
    it.arrive()
    assert it.side.records[REQUEST].handoff is late
    it.they_say(3)
    assert it.state == "prefilling"
    it.we_find(3)
    assert it.state == "ready"


async def test_what_arrives_while_it_drains_is_not_hashed() -> None:
    it = Decoder()
    it.we_find(1)
    it.they_say(2)
    it.side.cancel(REQUEST, "gone")
    assert it.state == "draining"
    it.arrive()
    assert it.replica.hashed == []
    assert it.settled()


class Prefiller(World):
    """One ticket whose prompt has been computed and whose pages are being hashed."""

    def __init__(self) -> None:
        super().__init__(Role.PREFILL)
        self.side = self.replica.user = PrefillSide(self.control, self.replica)
        ticket = wire.PrefillRequest(
            request=REQUEST, source_replica=PREFILLER, target_replica=DECODER, target_incarnation=THERE,
            shape_digest=SHAPE.digest(), seed=3, prompt=PROMPT, start_token=0, target_pages=(),
            immediates=(IMMEDIATE,), lease_s=60.0, verify=True,
        )  # fmt: skip
        self.side.receive(PEER, THERE, ticket)
        plan = self.replica.plan()
        assert plan is not None
        self.replica.complete(plan, [], 0.1)

    def all_sent(self) -> None:
        self.side.transferred(Sent(request=REQUEST, immediate=IMMEDIATE, num_pieces=(14,), num_bytes=99))


async def test_the_source_keeps_its_pages_until_they_are_hashed() -> None:
    it = Prefiller()
    it.all_sent()
    assert it.replica.pool.num_owned == 7
    it.replica.hashed.pop()((4, 5))
    assert it.settled()
    assert it.sent[-1] == wire.PrefillDigests(request=REQUEST, immediate=IMMEDIATE, digests=(4, 5))
    assert it.side.records == {}


async def test_the_source_keeps_its_pages_until_they_are_sent() -> None:
    it = Prefiller()
    it.replica.hashed.pop()((4, 5))
    assert it.replica.pool.num_owned == 7
    it.all_sent()
    assert it.settled()


@pytest.mark.parametrize("sent_first", [True, False])
async def test_a_cancel_does_not_wait_for_hashes(sent_first: bool) -> None:
    it = Prefiller()
    if sent_first:
        it.all_sent()
    it.side.cancelled(PEER, wire.CancelPrefill(request=REQUEST, immediate=IMMEDIATE))
    if not sent_first:
        it.all_sent()
    assert it.settled()
    assert it.kinds()[-1] == "PrefillStopped"
    it.replica.hashed.pop()((4, 5))
    assert it.kinds()[-1] == "PrefillStopped"
