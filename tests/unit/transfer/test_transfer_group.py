"""Replica sets of several ranks, against ports that do what the test says: parts become one handoff."""

from __future__ import annotations

import errno

import pytest
from scripted_port import ScriptedPort
from transfer_shapes import make_shape

from pdd.base.errors import BadTicket, FabricBusy, FabricError, InvariantBroken
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import pack
from pdd.fabric.port import PeerInfo, PortFailed, Watch
from pdd.memory.shape import KvShape
from pdd.transfer.group import Arrived, Drained, MessengerGroup, PortBroken, Sent, Stopped
from pdd.transfer.messenger import Messenger
from pdd.wire.messages import Grant, PrefillRequest

DECODER, PREFILLER, OTHER = Incarnation("d" * 16), Incarnation("e" * 16), Incarnation("f" * 16)
REPLICA = ReplicaName("decode/0")
R = RequestId("r")
ONE, TWO, FOUR = (make_shape(tp, 4) for tp in (1, 2, 4))
IMMEDIATES = (pack(5, 6), pack(7, 8), pack(9, 10), pack(11, 12))


class Side:
    """One replica set."""

    def __init__(self, shape: KvShape) -> None:
        self.ports = [ScriptedPort() for _ in range(shape.tp)]
        messengers = [
            Messenger(port, shape.layout, 4096 * (1 + rank), Watch(90 + rank), arena_fd=30 + rank)
            for rank, port in enumerate(self.ports)
        ]
        self.group = MessengerGroup(shape, messengers)


def connected(own: KvShape, target: KvShape) -> Side:
    side = Side(own)
    for rank in range(target.tp):
        side.group.connect(DECODER, grant(rank))
    return side


def grant(rank: int, address: bytes = b"there") -> Grant:
    return Grant(replica=REPLICA, rank=rank, address=b"%b %d" % (address, rank))


def ticket(target: KvShape, **changes: object) -> PrefillRequest:
    """Four blocks of 4 positions, 14 positions in all."""
    fields: dict[str, object] = {
        "request": R,
        "source_replica": ReplicaName("prefill/0"),
        "target_replica": REPLICA,
        "target_incarnation": DECODER,
        "shape_digest": target.digest(),
        "seed": 0,
        "prompt": tuple(range(15)),
        "start_token": 0,
        "target_pages": tuple(range(target.layout.num_pages_for(14))),
        "immediates": IMMEDIATES[: target.tp],
        "lease_s": 1.0,
    }
    return PrefillRequest(**(fields | changes))  # type: ignore[arg-type]


def announced(own: KvShape, target: KvShape) -> Side:
    side = connected(own, target)
    side.group.accept(ticket(target), DECODER, target)
    side.group.announce(R, 0, 14, last=True, pages=[PageId(it) for it in (3, 2, 1, 0)], counter_base=30)
    return side


# The source.


def test_each_rank_sends_its_heads_and_waits_on_its_own_watch() -> None:
    side = announced(TWO, ONE)
    for rank, port in enumerate(side.ports):
        (write,) = port.writes
        assert (write.watch, write.counter_base) == (Watch(90 + rank), 30)
        assert (write.source_base, write.target_base) == (4096 * (1 + rank), 0)
        assert port.peers[write.peer] == b"there 0"
        assert (list(write.source_pages), list(write.target_pages)) == ([3, 2, 1, 0], [0, 1, 2, 3])
        assert write.immediate == IMMEDIATES[0]
        assert [piece.source_offset_bytes for piece in write.pieces] == [0, TWO.layout.page_bytes // 2]
    assert side.ports[0].writes[0].pieces[0].target_offset_bytes == 0
    assert side.ports[1].writes[0].pieces[0].target_offset_bytes == ONE.layout.page_bytes // 4
    assert side.group.check() == []


def test_one_rank_sends_to_all() -> None:
    side = announced(ONE, TWO)
    first, second = side.ports[0].writes
    assert [side.ports[0].peers[write.peer] for write in (first, second)] == [b"there 0", b"there 1"]
    assert (first.immediate, second.immediate) == IMMEDIATES[:2]


def test_a_page_size_twice_the_other_takes_a_write_for_each_half() -> None:
    small, large = make_shape(1, 2, 4), make_shape(1, 2, 8)
    first, second = announced(small, large).ports[0].writes
    assert (list(first.source_pages), list(first.target_pages)) == ([3, 1], [0, 1])
    assert (list(second.source_pages), list(second.target_pages)) == ([2, 0], [0, 1])


def test_sent_when_every_leg_is() -> None:
    side = announced(TWO, ONE)
    side.ports[1].done(0)
    assert side.group.poll() == []
    side.ports[0].done(0)
    (sent,) = side.group.poll()
    assert isinstance(sent, Sent)
    assert sent.num_pieces == (2 * 4 * 4,)
    assert side.group.check() == []


def test_a_rank_that_has_sent_its_chunks_waits_for_more_and_for_the_others() -> None:
    side = connected(TWO, ONE)
    side.group.accept(ticket(ONE), DECODER, ONE)
    side.group.announce(R, 0, 8, last=False, pages=[PageId(3), PageId(2)], counter_base=0)
    side.ports[0].done(0)
    side.ports[1].done(0)
    assert side.group.poll() == []
    side.group.announce(R, 8, 14, last=True, pages=[PageId(1), PageId(0)], counter_base=2)
    assert [[list(write.target_pages) for write in port.writes] for port in side.ports] == [[[0, 1], [2, 3]]] * 2
    side.ports[1].done(1)
    assert side.group.poll() == []
    side.ports[0].done(1)
    assert [type(event) for event in side.group.poll()] == [Sent]


def test_a_rank_whose_heads_others_serve_sends_nothing() -> None:
    latent = make_shape(4, 1, num_planes=1)
    one = make_shape(1, 1, num_planes=1)
    side = announced(latent, one)
    (used,) = [port for port in side.ports if port.writes]
    used.done(0)
    assert [type(event) for event in side.group.poll()] == [Sent]


def test_a_failed_write_stops_the_other_ranks() -> None:
    side = announced(FOUR, TWO)
    side.ports[2].done(0, errno.ECONNRESET, num_pieces=3)
    assert side.group.poll() == []
    assert [len(port.cancelled) for port in side.ports] == [1, 1, 0, 1]
    side.group.announce(R, 0, 14, last=True, pages=[], counter_base=0)
    side.ports[0].done(0)
    side.ports[1].done(0, errno.ECANCELED, num_pieces=5)
    assert side.group.poll() == [], "rank 3 may still write"
    side.ports[3].done(0, errno.ECANCELED, num_pieces=0)
    (stopped,) = side.group.poll()
    assert isinstance(stopped, Stopped)
    assert stopped.num_pieces == (16 + 5, 3)
    assert stopped.reason.startswith("a write to decode/0 rank 1 failed: ")
    assert side.group.check() == []


def test_what_one_rank_has_sent_counts_when_another_stops() -> None:
    side = announced(TWO, ONE)
    side.ports[0].done(0)
    side.ports[1].done(0, errno.ECONNRESET, num_pieces=1)
    (stopped,) = side.group.poll()
    assert isinstance(stopped, Stopped)
    assert stopped.num_pieces == (16 + 1,)


def test_a_stop_that_ends_another_rank_at_once_is_told_at_once() -> None:
    side = connected(TWO, ONE)
    side.ports[0].busy = True
    side.group.accept(ticket(ONE), DECODER, ONE)
    side.group.announce(R, 0, 14, last=True, pages=[PageId(it) for it in range(4)], counter_base=0)
    side.ports[1].done(0, errno.ECONNRESET, num_pieces=0)
    assert [type(event) for event in side.group.poll()] == [Stopped]


def test_a_stop_counts_for_each_target_rank() -> None:
    side = announced(ONE, TWO)
    side.group.stop(R, "cancelled")
    side.ports[0].done(0)
    side.ports[0].done(1, errno.ECANCELED, num_pieces=2)
    (stopped,) = side.group.poll()
    assert stopped == Stopped(request=R, immediate=IMMEDIATES[0], num_pieces=(16, 2), reason="cancelled")


def test_a_stop_before_the_first_chunk() -> None:
    side = connected(FOUR, TWO)
    side.group.accept(ticket(TWO), DECODER, TWO)
    side.group.stop(R)
    assert [type(event) for event in side.group.poll()] == [Stopped]


def test_a_broken_port_stops_what_the_others_send() -> None:
    side = announced(TWO, ONE)
    side.ports[0].done(0, errno.EIO, num_pieces=0)
    side.ports[0].script.append(PortFailed(errno.EIO))
    assert side.group.poll() == [PortBroken(errno.EIO)]
    assert len(side.ports[1].cancelled) == 1
    side.ports[1].done(0, errno.ECANCELED, num_pieces=0)
    assert [type(event) for event in side.group.poll()] == [Stopped]
    with pytest.raises(FabricError, match="port failed"):
        side.group.accept(ticket(ONE), DECODER, ONE)


def test_a_new_grant_of_one_rank_ends_what_went_there() -> None:
    side = announced(ONE, TWO)
    side.group.connect(DECODER, grant(1))
    assert side.ports[0].dropped == []
    side.group.connect(DECODER, grant(1, b"anew"))
    assert side.ports[0].dropped == [side.ports[0].writes[1].peer]
    side.ports[0].done(0)
    side.ports[0].done(1, errno.ECANCELED, num_pieces=0)
    assert [type(event) for event in side.group.poll()] == [Stopped]
    side.group.accept(ticket(TWO, immediates=(pack(5, 7), IMMEDIATES[1])), DECODER, TWO)


def test_tickets_need_every_rank() -> None:
    side = Side(ONE)
    side.group.connect(DECODER, grant(0))
    with pytest.raises(BadTicket, match="rank 1 has granted us no memory key"):
        side.group.accept(ticket(TWO), DECODER, TWO)
    side.group.connect(DECODER, grant(1))
    with pytest.raises(BadTicket, match="shape_digest"):
        side.group.accept(ticket(TWO, shape_digest=ONE.digest()), DECODER, TWO)
    side.group.accept(ticket(TWO), DECODER, TWO)
    with pytest.raises(BadTicket, match="rank 1 was used by an earlier ticket"):
        side.group.accept(ticket(TWO, request=RequestId("s"), immediates=(pack(5, 7), IMMEDIATES[1])), DECODER, TWO)


def test_where_no_connection_can_be_made_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    side = connected(TWO, ONE)

    def fail(address: bytes) -> None:
        raise FabricError("no such address", errno.EINVAL)

    with monkeypatch.context() as patch:
        patch.setattr(side.ports[1], "add_peer", fail)
        with pytest.raises(FabricError):
            side.group.accept(ticket(ONE), DECODER, ONE)
    assert side.group.check() == []
    side.group.accept(ticket(ONE), DECODER, ONE)


def test_what_a_ticket_names_is_one_for_each_rank() -> None:
    side = connected(ONE, TWO)
    for immediates in (IMMEDIATES[:1], IMMEDIATES[:3]):
        with pytest.raises(BadTicket, match=f"immediates: {len(immediates)} for 2 ranks"):
            side.group.accept(ticket(TWO, immediates=immediates), DECODER, TWO)
    side.group.accept(ticket(TWO), DECODER, TWO)


def test_the_ways_to_a_peer_are_those_that_pages_have_gone() -> None:
    side = connected(TWO, ONE)
    side.group.connect(OTHER, grant(0, b"here"))
    assert side.group.ways(DECODER) == []
    side.group.accept(ticket(ONE), DECODER, ONE)
    side.group.accept(ticket(ONE, request=RequestId("s"), target_incarnation=OTHER), OTHER, ONE)
    assert side.group.ways(DECODER) == [PeerInfo(copies=False, num_paths=4, num_open=3)] * 2
    assert [way.copies for way in side.group.ways(OTHER)] == [True, True]
    side.group.disconnect(DECODER)
    assert side.group.ways(DECODER) == []
    assert len(side.group.ways(OTHER)) == 2


def test_source_arenas_are_registered_once_with_their_memfds() -> None:
    side = connected(TWO, ONE)
    side.group.accept(ticket(ONE), DECODER, ONE)
    side.group.connect(OTHER, grant(0))
    side.group.accept(ticket(ONE, request=RequestId("s"), target_incarnation=OTHER), OTHER, ONE)
    arenas = [(4096 * (1 + rank), TWO.layout.arena_bytes, 30 + rank) for rank in range(2)]
    assert [port.registered for port in side.ports] == [[arena] for arena in arenas]


def test_impossible_chunks_change_nothing() -> None:
    small, large = make_shape(1, 2, 4), make_shape(1, 2, 8)
    side = connected(small, large)
    side.group.accept(ticket(large), DECODER, large)
    with pytest.raises(InvariantBroken):
        side.group.announce(R, 0, 14, last=True, pages=[PageId(0), PageId(1)], counter_base=0)
    side.group.announce(R, 0, 14, last=True, pages=[PageId(it) for it in range(4)], counter_base=0)
    assert len(side.ports[0].writes) == 2


# The target.


def armed(shape: KvShape, source: KvShape) -> tuple[Side, tuple[Immediate, ...]]:
    side = Side(shape)
    assert len(side.group.grant(PREFILLER)) == shape.tp
    return side, side.group.arm(R, PREFILLER, source, 0, 14)


def test_every_rank_grants_its_own_arena() -> None:
    side = Side(TWO)
    grants = side.group.grants(PREFILLER, REPLICA)
    addresses = [memory.address for memory in side.group.grant(PREFILLER)]
    assert grants == [Grant(replica=REPLICA, rank=rank, address=address) for rank, address in enumerate(addresses)]
    assert [[address for address, _, _ in port.registered] for port in side.ports] == [[4096], [8192]]
    others = [grant.address for grant in side.group.grants(OTHER, REPLICA)]
    assert set(addresses).isdisjoint(others)


def test_arrived_when_every_rank_is_complete() -> None:
    side, immediates = armed(TWO, FOUR)
    assert [port.expected[immediate] for port, immediate in zip(side.ports, immediates, strict=True)] == [32, 32]
    side.ports[0].placed[immediates[0]] = 5
    assert side.group.arrived(R) == (5, 64)
    side.ports[1].reach(immediates[1], 2.0, 9.0)
    assert side.group.poll() == []
    with pytest.raises(InvariantBroken, match="may still write"):
        side.group.forget(R)
    side.ports[0].reach(immediates[0], 1.0, 8.0)
    num_bytes = 2 * 2 * 4 * TWO.layout.page_bytes
    assert side.group.poll() == [
        Arrived(request=R, immediate=immediates[0], num_pieces=64, num_bytes=num_bytes, first_s=1.0, last_s=9.0)
    ]
    side.group.stopped(R, immediates[0], (32, 32))
    side.group.revoke(PREFILLER)
    assert side.group.poll() == []
    side.group.forget(R)
    assert side.group.check() == []
    side.group.grant(PREFILLER)
    side.group.arm(R, PREFILLER, FOUR, 0, 14)


def test_drained_when_the_last_rank_is() -> None:
    side, immediates = armed(TWO, TWO)
    side.ports[1].reach(immediates[1])
    side.group.stopped(R, immediates[0], (3, 8))
    assert side.group.poll() == []
    side.ports[0].reach(immediates[0])
    assert side.group.poll() == [Drained(request=R, immediate=immediates[0], fenced=False)]
    assert side.group.check() == []
    side.group.arm(R, PREFILLER, TWO, 0, 14)


def test_a_fence_drains_what_is_open() -> None:
    side, immediates = armed(TWO, TWO)
    side.ports[1].reach(immediates[1])
    side.group.poll()
    side.group.revoke(PREFILLER)
    assert side.group.poll() == [Drained(request=R, immediate=immediates[0], fenced=True)]
    assert [len(port.released) for port in side.ports] == [1, 1]


def test_a_rejection_that_a_piece_disproves_changes_nothing() -> None:
    side, immediates = armed(TWO, TWO)
    side.ports[1].placed[immediates[1]] = 1
    side.group.rejected(R, immediates[0])
    side.group.stopped(R, immediates[0], (0,))
    assert side.group.poll() == []
    assert side.group.counters.contradictions == 2
    side.ports[1].placed[immediates[1]] = 0
    side.group.rejected(R, immediates[0])
    assert side.group.poll() == [Drained(request=R, immediate=immediates[0], fenced=False)]


def test_a_handoff_is_named_by_its_first_immediate() -> None:
    side, immediates = armed(TWO, TWO)
    side.group.rejected(R, Immediate(immediates[0] + 128))
    side.group.stopped(RequestId("unknown"), immediates[0], (0, 0))
    assert side.group.poll() == []
    assert side.group.counters.ignored == 2


def test_a_rank_that_cannot_arm_disarms_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    side = Side(TWO)
    side.group.grant(PREFILLER)

    def fail(immediate: Immediate, num_pieces: int) -> None:
        raise FabricBusy("too many events wait", errno.EAGAIN)

    with monkeypatch.context() as patch:
        patch.setattr(side.ports[1], "expect", fail)
        with pytest.raises(FabricBusy):
            side.group.arm(R, PREFILLER, TWO, 0, 14)
    assert side.ports[0].expected == {}
    assert side.group.poll() == []
    assert side.group.check() == []
    side.group.arm(R, PREFILLER, TWO, 0, 14)


def test_shapes_that_do_not_fit_are_not_armed() -> None:
    side = Side(TWO)
    side.group.grant(PREFILLER)
    with pytest.raises(InvariantBroken, match="num_planes"):
        side.group.arm(R, PREFILLER, make_shape(2, 4, num_planes=1), 0, 14)


def test_a_rank_whose_port_breaks_fences_the_others() -> None:
    side, immediates = armed(TWO, TWO)
    side.ports[0].script.append(PortFailed(errno.EIO))
    assert side.group.poll() == [PortBroken(errno.EIO), Drained(request=R, immediate=immediates[0], fenced=True)]
    assert len(side.ports[1].released) == 1
    assert side.group.check() == []


def test_close_ends_everything() -> None:
    side, _ = armed(TWO, TWO)
    for rank in range(2):
        side.group.connect(DECODER, grant(rank))
    side.group.accept(ticket(TWO, request=RequestId("out")), DECODER, TWO)
    side.group.close()
    assert all(port.closed for port in side.ports)
    assert {type(event) for event in side.group.poll()} == {Stopped, Drained}


def test_a_messenger_for_each_rank() -> None:
    for number in (0, 1, 3):
        with pytest.raises(InvariantBroken, match=f"{number} messengers for 2 ranks"):
            MessengerGroup(TWO, [Messenger(ScriptedPort(), TWO.layout, 4096)] * number)
