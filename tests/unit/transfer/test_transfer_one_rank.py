"""A replica set of one rank against a port that does what the test says."""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator

import pytest
from scripted_port import ScriptedPort
from transfer_shapes import make_shape

from pdd.base.errors import BadTicket, FabricBusy, FabricError, InvariantBroken, QueueFull
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import NUM_SLOTS, pack
from pdd.fabric.port import CountReached, PortFailed, StrayWrite, Watch
from pdd.transfer.group import Arrived, Drained, MessengerGroup, PortBroken, Sent, Stopped, Stray
from pdd.transfer.messenger import Messenger
from pdd.wire.messages import Grant, PrefillRequest

SHAPE = make_shape(1, 1, page_tokens=4, num_pages=8)
TARGET = make_shape(1, 1, page_tokens=4, num_pages=20)
LAYOUT, TARGET_LAYOUT = SHAPE.layout, TARGET.layout
DECODER, PREFILLER, OTHER = Incarnation("d" * 16), Incarnation("e" * 16), Incarnation("f" * 16)
REPLICA = ReplicaName("decode/0")
R = RequestId("r")
WATCH = Watch(9)


@pytest.fixture
def port() -> ScriptedPort:
    return ScriptedPort()


def group(port: ScriptedPort, watch: Watch | None = None) -> MessengerGroup:
    return MessengerGroup(SHAPE, [Messenger(port, SHAPE.layout, 4096, watch)])


@pytest.fixture
def target(port: ScriptedPort) -> Iterator[MessengerGroup]:
    messenger = group(port)
    messenger.grant(PREFILLER)
    yield messenger
    assert messenger.check() == []


@pytest.fixture
def source(port: ScriptedPort) -> Iterator[MessengerGroup]:
    messenger = group(port, WATCH)
    messenger.connect(DECODER, grant(b"there", REPLICA))
    yield messenger
    assert messenger.check() == []


def ticket(**changes: object) -> PrefillRequest:
    """Four pages of KV (14 positions), of which the target lacks the last three."""
    fields: dict[str, object] = {
        "request": R,
        "source_replica": ReplicaName("prefill/0"),
        "target_replica": REPLICA,
        "target_incarnation": DECODER,
        "shape_digest": TARGET.digest(),
        "seed": 0,
        "prompt": tuple(range(15)),
        "start_token": 4,
        "target_pages": (PageId(19), PageId(3), PageId(11)),
        "immediates": (pack(5, 6),),
        "lease_s": 1.0,
    }
    return PrefillRequest(**(fields | changes))  # type: ignore[arg-type]


def arm(messenger: MessengerGroup, request: RequestId, peer: Incarnation, num_pages: int) -> Immediate:
    (immediate,) = messenger.arm(request, peer, SHAPE, 0, 4 * num_pages)
    return immediate


def grant(address: bytes = b"there", replica: ReplicaName = REPLICA, rank: int = 0) -> Grant:
    return Grant(replica=replica, rank=rank, address=address)


def accept(messenger: MessengerGroup, **changes: object) -> None:
    messenger.accept(ticket(**changes), DECODER, TARGET)


def pages(*numbers: int) -> tuple[PageId, ...]:
    return tuple(map(PageId, numbers))


# The source.


def test_chunks_become_writes_of_what_the_target_lacks(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.announce(R, 0, 8, last=False, pages=pages(7, 1), counter_base=40)
    source.announce(R, 8, 14, last=True, pages=pages(0, 6), counter_base=42)
    first, second = port.writes
    assert (*map(list, (first.source_pages, first.target_pages)), first.counter_base) == ([1], [19], 40)
    assert (*map(list, (second.source_pages, second.target_pages)), second.counter_base) == ([0, 6], [3, 11], 42)
    assert first.watch == second.watch == WATCH
    assert port.peers == {first.peer: b"there"}
    assert (first.target_base, first.immediate) == (0, pack(5, 6))
    assert (first.source_base, first.source_layer_bytes) == (4096, LAYOUT.layer_bytes)
    assert first.target_layer_bytes == TARGET_LAYOUT.layer_bytes
    port.done(1)
    assert source.poll() == []
    port.done(0)
    assert source.poll() == [Sent(request=R, immediate=pack(5, 6), num_pieces=(6,), num_bytes=6 * LAYOUT.page_bytes)]


def test_a_chunk_of_what_the_target_has_sends_nothing(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.announce(R, 0, 4, last=False, pages=pages(7), counter_base=0)
    assert port.writes == []
    assert source.poll() == []


def test_cached_pages_wait_for_no_counter(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.announce(R, 0, 14, last=True, pages=pages(0, 1, 2, 3), counter_base=None)
    (write,) = port.writes
    assert write.watch is None
    assert list(write.source_pages) == [1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target_replica": ReplicaName("decode/1")}, "not connected"),
        ({"target_incarnation": OTHER}, "target_incarnation"),
        ({"shape_digest": "0" * 16}, "shape_digest"),
        ({"start_token": 5}, "start_token"),
        ({"start_token": -4}, "start_token"),
        ({"start_token": 16}, "start_token"),
        ({"start_token": -(2**63)}, "start_token"),
        ({"prompt": ()}, "start_token"),
        ({"prompt": (1,)}, "start_token"),
        ({"target_pages": ()}, "0 for 3 pages"),
        ({"target_pages": (1, 2, 3, 4)}, "4 for 3 pages"),
        ({"target_pages": (1, 2, 20)}, "outside"),
        ({"target_pages": (1, 2, -1)}, "outside"),
        ({"target_pages": (1, 2, 2)}, "twice"),
        ({"immediates": (-1,)}, "immediates"),
        ({"immediates": (1 << 32,)}, "immediates"),
        ({"immediates": (pack(5, 6) | 1,)}, "immediates"),
        ({"lease_s": math.nan}, "lease_s"),
        ({"lease_s": math.inf}, "lease_s"),
        ({"lease_s": 0.0}, "lease_s"),
    ],
)
def test_bad_tickets_name_the_field_and_leave_nothing(
    source: MessengerGroup, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(BadTicket, match=words):
        accept(source, **changes)
    accept(source)


def test_a_shape_that_does_not_fit_is_a_bad_ticket(source: MessengerGroup) -> None:
    with pytest.raises(BadTicket, match="page_tokens: 4 at the prefiller, 6 at the decoder"):
        source.accept(ticket(), DECODER, make_shape(page_tokens=6))


def test_a_ticket_is_good_for_one_handoff(source: MessengerGroup) -> None:
    accept(source)
    with pytest.raises(BadTicket, match="used by an earlier ticket"):
        accept(source)
    with pytest.raises(BadTicket, match="still being handed off"):
        accept(source, immediates=(pack(5, 7),))
    source.stop(R)
    assert [type(event) for event in source.poll()] == [Stopped]
    with pytest.raises(BadTicket, match="used by an earlier ticket"):
        accept(source, request=RequestId("other"))
    accept(source, immediates=(pack(5, 7),))


def test_a_stop_confirms_what_was_posted_once_that_has_ended(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    source.announce(R, 8, 12, last=False, pages=pages(2), counter_base=2)
    source.stop(R, "cancelled")
    source.stop(R, "again")
    source.announce(R, 12, 14, last=True, pages=pages(3), counter_base=4)
    assert port.cancelled == [write.token for write in port.writes]
    port.done(0)
    assert source.poll() == []
    port.done(1, errno.ECANCELED, num_pieces=1)
    assert source.poll() == [Stopped(request=R, immediate=pack(5, 6), num_pieces=(3,), reason="cancelled")]
    assert len(port.writes) == 2


def test_a_stop_before_the_first_chunk(source: MessengerGroup) -> None:
    accept(source)
    source.stop(R, "nobody wants it")
    assert source.poll() == [Stopped(request=R, immediate=pack(5, 6), num_pieces=(0,), reason="nobody wants it")]


def test_a_stop_of_what_ended_or_never_was_is_ignored(port: ScriptedPort, source: MessengerGroup) -> None:
    source.stop(R)
    accept(source)
    source.announce(R, 0, 14, last=True, pages=pages(0, 1, 2, 3), counter_base=0)
    port.done(0)
    assert [type(event) for event in source.poll()] == [Sent]
    source.stop(R)
    source.announce(R, 0, 14, last=True, pages=pages(0, 1, 2, 3), counter_base=0)
    assert source.poll() == []
    assert source.counters.ignored == 3


def test_a_failed_write_stops_the_others(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    source.announce(R, 8, 14, last=True, pages=pages(2, 3), counter_base=2)
    port.done(0, errno.ECONNRESET, num_pieces=1)
    assert source.poll() == []
    assert port.cancelled == [port.writes[1].token]
    port.done(1, errno.ECANCELED, num_pieces=0)
    (stopped,) = source.poll()
    assert isinstance(stopped, Stopped)
    assert stopped.num_pieces == (1,)
    assert "reset" in stopped.reason


def test_a_busy_port_gets_the_write_later_and_in_order(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    port.busy = True
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    source.announce(R, 8, 14, last=True, pages=pages(2, 3), counter_base=2)
    assert source.poll() == []
    assert port.writes == []
    port.busy = False
    assert source.poll() == []
    assert [write.counter_base for write in port.writes] == [0, 2]


def test_a_stop_while_writes_wait_for_the_port(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    accept(source, request=RequestId("other"), immediates=(pack(7, 0),))
    port.busy = True
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    source.announce(RequestId("other"), 0, 8, last=False, pages=pages(2, 3), counter_base=0)
    source.stop(R)
    assert [type(event) for event in source.poll()] == [Stopped]
    port.busy = False
    source.poll()
    assert [list(write.source_pages) for write in port.writes] == [[3]]


def test_a_write_that_the_port_refuses_stops_the_handoff(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    port.write_error = FabricError("no such peer", errno.EINVAL)
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    (stopped,) = source.poll()
    assert isinstance(stopped, Stopped)
    assert "no such peer" in stopped.reason


def test_a_lost_link_stops_all_that_goes_there(port: ScriptedPort, source: MessengerGroup) -> None:
    source.connect(DECODER, grant(b"elsewhere", ReplicaName("decode/1")))
    source.connect(OTHER, grant(b"other", REPLICA))
    accept(source)
    accept(source, request=RequestId("two"), target_replica=ReplicaName("decode/1"))
    source.accept(ticket(request=RequestId("three"), target_incarnation=OTHER), OTHER, TARGET)
    source.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    source.disconnect(DECODER)
    assert len(port.dropped) == 2
    assert [event.request for event in source.poll() if isinstance(event, Stopped)] == ["two"]
    port.done(0, errno.ECANCELED, num_pieces=0)
    assert [event.request for event in source.poll() if isinstance(event, Stopped)] == [R]
    with pytest.raises(BadTicket, match="not connected"):
        accept(source, request=RequestId("four"))
    source.announce(RequestId("three"), 0, 8, last=False, pages=pages(2, 3), counter_base=0)
    assert len(port.writes) == 2


def test_a_replica_with_a_new_address_is_another_one(port: ScriptedPort, source: MessengerGroup) -> None:
    accept(source)
    source.connect(DECODER, grant(b"there", REPLICA))
    assert source.poll() == []
    source.connect(DECODER, grant(b"anew", REPLICA))
    assert len(port.dropped) == 1
    assert [type(event) for event in source.poll()] == [Stopped]
    accept(source)


@pytest.mark.parametrize(
    "chunk",
    [
        (8, 12, False, pages(2)),
        (0, 8, False, pages(1)),
        (0, 8, True, pages(1, 2)),
        (0, 20, False, pages(0, 1, 2, 3, 4)),
        (0, 8, False, pages(0, 8)),
        (0, 8, False, pages(-1, 0)),
    ],
    ids=["gap", "too few pages", "ends early", "ends late", "page too large", "page negative"],
)
def test_impossible_chunks_change_nothing(
    port: ScriptedPort, source: MessengerGroup, chunk: tuple[int, int, bool, tuple[PageId, ...]]
) -> None:
    start, end, last, where = chunk
    accept(source)
    with pytest.raises(InvariantBroken):
        source.announce(R, start, end, last=last, pages=where, counter_base=0)
    source.announce(R, 0, 14, last=True, pages=pages(0, 1, 2, 3), counter_base=0)
    assert [list(write.source_pages) for write in port.writes] == [[1, 2, 3]]


def test_a_replica_without_a_counter_cannot_arm(port: ScriptedPort) -> None:
    messenger = group(port)
    messenger.connect(DECODER, grant(b"there", REPLICA))
    accept(messenger)
    with pytest.raises(InvariantBroken, match="layer counter"):
        messenger.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)


# The target.


def test_all_pieces_arrive(port: ScriptedPort, target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    assert port.expected == {immediate: 6}
    port.placed[immediate] = 4
    assert target.arrived(R) == (4, 6)
    port.reach(immediate)
    assert target.poll() == [
        Arrived(request=R, immediate=immediate, num_pieces=6, num_bytes=6 * LAYOUT.page_bytes, first_s=1.0, last_s=2.0)
    ]
    assert target.arrived(R) == (6, 6)
    target.stopped(R, immediate, (6,))
    target.rejected(R, immediate)
    target.revoke(PREFILLER)
    assert target.poll() == []
    target.forget(R)
    target.forget(R)
    assert target.arrived(R) == (0, 0)


def test_each_peer_has_a_key_of_its_own(port: ScriptedPort, target: MessengerGroup) -> None:
    (mine,), (other,) = target.grant(PREFILLER), target.grant(OTHER)
    assert mine.address != other.address
    assert target.grant(PREFILLER) == (mine,)
    target.revoke(OTHER)
    assert port.released == [other.memory]
    assert target.grant(OTHER)[0].address not in (mine.address, other.address)


def test_a_stop_drains_when_what_was_posted_has_been_counted(port: ScriptedPort, target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    target.stopped(R, immediate, (2,))
    assert port.expected == {immediate: 2}
    assert target.poll() == []
    target.stopped(R, immediate, (5,))
    assert port.expected == {immediate: 2}, "the second word does not count"
    port.reach(immediate)
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=False)]
    again = arm(target, R, PREFILLER, 3)
    assert again != immediate


def test_a_stop_that_crosses_the_last_arrival(port: ScriptedPort, target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    port.reach(immediate)
    target.stopped(R, immediate, (6,))
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=False)]


@pytest.mark.parametrize("num_pieces", [-1, 1, 7])
def test_a_number_that_cannot_be_is_not_believed(port: ScriptedPort, target: MessengerGroup, num_pieces: int) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    port.placed[immediate] = 2
    target.stopped(R, immediate, (num_pieces,))
    target.rejected(R, immediate)
    assert target.poll() == []
    assert target.counters.contradictions == 2
    target.revoke(PREFILLER)
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=True)]


def test_a_rejection_drains_at_once(target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    target.rejected(R, immediate)
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=False)]


def test_news_of_another_handoff_changes_nothing(target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    target.stopped(R, Immediate(immediate + 128), (0,))
    target.rejected(R, Immediate(immediate + 128))
    target.stopped(RequestId("unknown"), immediate, (0,))
    target.rejected(RequestId("unknown"), immediate)
    assert target.poll() == []
    assert target.counters.ignored == 4


def test_a_lost_peer_is_fenced_and_others_are_not(port: ScriptedPort, target: MessengerGroup) -> None:
    (key,) = target.grant(PREFILLER)
    target.grant(OTHER)
    immediate = arm(target, R, PREFILLER, 3)
    other = arm(target, RequestId("other"), OTHER, 1)
    target.revoke(PREFILLER)
    assert port.released == [key.memory]
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=True)]
    assert list(port.expected) == [other]
    target.revoke(PREFILLER)
    with pytest.raises(InvariantBroken):
        arm(target, R, PREFILLER, 3)


def test_a_fence_that_fails_makes_no_page_safe(port: ScriptedPort, target: MessengerGroup) -> None:
    target.grant(PREFILLER)
    immediate = arm(target, R, PREFILLER, 3)
    port.release_error = FabricError("fabric: release memory 1: Device or resource busy", errno.EBUSY)
    target.revoke(PREFILLER)
    assert target.poll() == []
    assert target.check() == []
    target.close()
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=True)], "nothing is open any more"


def test_without_fences_time_must_pass() -> None:
    port = ScriptedPort(fences=False)
    target = group(port)
    target.grant(PREFILLER)
    immediate = arm(target, R, PREFILLER, 3)
    counted = arm(target, RequestId("counted"), PREFILLER, 1)
    target.expire(R)
    target.revoke(PREFILLER)
    assert target.poll() == []
    port.reach(counted)
    assert target.poll() == [Drained(request=RequestId("counted"), immediate=counted, fenced=False)]
    target.expire(R)
    target.expire(R)
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=True)]
    assert target.check() == []


def test_pages_in_flight_cannot_be_forgotten(target: MessengerGroup) -> None:
    arm(target, R, PREFILLER, 3)
    with pytest.raises(InvariantBroken, match="may still write"):
        target.forget(R)


def test_a_request_has_one_handoff_at_a_time(target: MessengerGroup) -> None:
    arm(target, R, PREFILLER, 3)
    with pytest.raises(InvariantBroken, match="armed already: True"):
        arm(target, R, PREFILLER, 3)


def test_a_late_write_is_a_stray_and_no_progress(port: ScriptedPort, target: MessengerGroup) -> None:
    immediate = arm(target, R, PREFILLER, 3)
    target.rejected(R, immediate)
    port.script += [StrayWrite(immediate, 3), CountReached(immediate, 1.0, 2.0)]
    assert target.poll() == [Drained(request=R, immediate=immediate, fenced=False), Stray(3)]
    assert (target.counters.strays, target.counters.ignored) == (3, 1)


def test_slots_run_out_and_come_back(target: MessengerGroup) -> None:
    for number in range(NUM_SLOTS):
        arm(target, RequestId(str(number)), PREFILLER, 1)
    with pytest.raises(QueueFull):
        arm(target, R, PREFILLER, 1)
    target.revoke(PREFILLER)
    target.grant(PREFILLER)
    arm(target, R, PREFILLER, 1)


def test_a_port_that_will_not_arm_costs_no_slot(
    port: ScriptedPort, target: MessengerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(immediate: Immediate, num_pieces: int) -> None:
        raise FabricBusy("too many events wait", errno.EAGAIN)

    with monkeypatch.context() as patch:
        patch.setattr(port, "expect", fail)
        with pytest.raises(FabricBusy):
            arm(target, R, PREFILLER, 1)
    arm(target, R, PREFILLER, 1)


# Both.


def test_a_broken_port_ends_everything(port: ScriptedPort) -> None:
    messenger = group(port, WATCH)
    (key,) = messenger.grant(PREFILLER)
    immediate = arm(messenger, R, PREFILLER, 3)
    messenger.connect(DECODER, grant(b"there", REPLICA))
    accept(messenger)
    messenger.announce(R, 0, 8, last=False, pages=pages(0, 1), counter_base=0)
    port.done(0, errno.EIO, num_pieces=0)
    port.script.append(PortFailed(errno.EIO))
    stopped, drained, broken = messenger.poll()
    assert isinstance(stopped, Stopped)
    assert drained == Drained(request=R, immediate=immediate, fenced=True)
    assert broken == PortBroken(errno.EIO)
    assert port.released == [key.memory], "its NIC may live on"
    with pytest.raises(FabricError, match="port failed"):
        arm(messenger, R, PREFILLER, 3)
    with pytest.raises(FabricError, match="port failed"):
        accept(messenger, immediates=(pack(8, 8),))
    assert messenger.check() == []


def test_close_ends_everything(port: ScriptedPort) -> None:
    messenger = group(port, WATCH)
    messenger.grant(PREFILLER)
    arm(messenger, R, PREFILLER, 3)
    messenger.connect(DECODER, grant(b"there", REPLICA))
    accept(messenger)
    messenger.close()
    assert port.closed
    assert {type(event) for event in messenger.poll()} == {Stopped, Drained}
