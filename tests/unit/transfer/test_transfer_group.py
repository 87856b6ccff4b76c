"""Replica sets of several ranks, against ports that do what the test says: parts become one handoff."""

from __future__ import annotations

import errno

import pytest
from scripted_port import ScriptedPort
from transfer_shapes import make_shape

from pdd.base.errors import BadTicket, FabricBusy, FabricError, InvariantBroken
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import pack
from pdd.fabric.port import PortFailed, Watch
from pdd.memory.shape import KvShape
from pdd.transfer.group import Arrived, Drained, MessengerGroup, PortBroken, Sent, Stopped
from pdd.transfer.messenger import Messenger
from pdd.wire.messages import Grant, PrefillRequest

DECODER, PREFILLER = Incarnation("d" * 16), Incarnation("e" * 16)
REPLICA = ReplicaName("decode/0")
R = RequestId("r")
ONE, TWO, FOUR = (make_shape(tp, 4) for tp in (1, 2, 4))
IMMEDIATES = (pack(5, 6), pack(7, 8), pack(9, 10), pack(11, 12))


class Side:
    """One replica set."""

    def __init__(self, shape: KvShape, num_nics: int = 1) -> None:
        self.ports = [ScriptedPort() for _ in range(shape.tp * num_nics)]
        messengers = [
            Messenger(port, shape.layout, 4096 * (1 + i // num_nics), Watch(90 + i))
            for i, port in enumerate(self.ports)
        ]
        self.group = MessengerGroup(shape, messengers)


def connected(own: KvShape, target: KvShape, own_nics: int = 1, target_nics: int = 1) -> Side:
    side = Side(own, own_nics)
    for rank in range(target.tp):
        for nic in range(target_nics):
            side.group.connect(DECODER, grant(rank, nic=nic))
    return side


def grant(rank: int, address: bytes = b"there", nic: int = 0) -> Grant:
    address = b"%b %d.%d" % (address, rank, nic)
    key = 70 + rank + 100 * nic
    return Grant(replica=REPLICA, rank=rank, nic=nic, address=address, key=key, base=1 << (20 + rank))


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
        "num_nics": 1,
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
        assert (write.source_base, write.key, write.target_base) == (4096 * (1 + rank), 70, 1 << 20)
        assert (write.source_pages, write.target_pages) == ((3, 2, 1, 0), (0, 1, 2, 3))
        assert write.immediate == IMMEDIATES[0]
        assert [piece.source_offset_bytes for piece in write.pieces] == [0, TWO.layout.page_bytes // 2]
    assert side.ports[0].writes[0].pieces[0].target_offset_bytes == 0
    assert side.ports[1].writes[0].pieces[0].target_offset_bytes == ONE.layout.page_bytes // 4
    assert side.group.check() == []


def test_one_rank_sends_to_all() -> None:
    side = announced(ONE, TWO)
    first, second = side.ports[0].writes
    assert (first.key, second.key) == (70, 71)
    assert (first.immediate, second.immediate) == IMMEDIATES[:2]
    assert first.peer != second.peer


def test_a_page_size_twice_the_other_takes_a_write_for_each_half() -> None:
    small, large = make_shape(1, 2, 4), make_shape(1, 2, 8)
    first, second = announced(small, large).ports[0].writes
    assert (first.source_pages, first.target_pages) == ((3, 1), (0, 1))
    assert (second.source_pages, second.target_pages) == ((2, 0), (0, 1))


def test_sent_when_every_leg_is() -> None:
    side = announced(TWO, ONE)
    side.ports[1].done(0)
    assert side.group.poll() == []
    side.ports[0].done(0)
    (sent,) = side.group.poll()
    assert isinstance(sent, Sent)
    assert sent.num_pieces == (2 * 4 * 4,)
    assert side.group.check() == []


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
    assert stopped.reason.startswith("a write to decode/0 rank 1 NIC 0 failed: ")
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
    with pytest.raises(BadTicket, match="rank 1 has granted us no memory key for its NIC 0"):
        side.group.accept(ticket(TWO), DECODER, TWO)
    side.group.connect(DECODER, grant(1))
    with pytest.raises(BadTicket, match="immediates: 1 for 2 ranks with 1 NICs each"):
        side.group.accept(ticket(TWO, immediates=IMMEDIATES[:1]), DECODER, TWO)
    with pytest.raises(BadTicket, match="shape_digest"):
        side.group.accept(ticket(TWO, shape_digest=ONE.digest()), DECODER, TWO)
    side.group.accept(ticket(TWO), DECODER, TWO)
    with pytest.raises(BadTicket, match="rank 1 NIC 0 was used by an earlier ticket"):
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


def test_impossible_chunks_change_nothing() -> None:
    small, large = make_shape(1, 2, 4), make_shape(1, 2, 8)
    side = connected(small, large)
    side.group.accept(ticket(large), DECODER, large)
    with pytest.raises(InvariantBroken):
        side.group.announce(R, 0, 14, last=True, pages=[PageId(0), PageId(1)], counter_base=0)
    side.group.announce(R, 0, 14, last=True, pages=[PageId(it) for it in range(4)], counter_base=0)
    assert len(side.ports[0].writes) == 2


# Several NICs.

LONG = make_shape(1, 4, num_pages=16)
LONG_TWO = make_shape(2, 4, num_pages=16)
LONG_PROMPT = tuple(range(4 * 11 + 1))
"""Eleven blocks: stripes of 4, 4 and 3."""
NIC_IMMEDIATES = tuple(pack(slot, 3) for slot in range(6))


def long_ticket(num_nics: int, **changes: object) -> PrefillRequest:
    fields: dict[str, object] = {
        "prompt": LONG_PROMPT,
        "target_pages": tuple(range(11)),
        "num_nics": num_nics,
        "immediates": NIC_IMMEDIATES[:num_nics],
    }
    return ticket(LONG, **(fields | changes))


def announced_long(own: KvShape, own_nics: int, target_nics: int) -> Side:
    side = connected(own, LONG, own_nics, target_nics)
    side.group.accept(long_ticket(target_nics), DECODER, LONG)
    side.group.announce(R, 0, 44, last=True, pages=[PageId(it) for it in range(11)], counter_base=30)
    return side


@pytest.mark.parametrize(
    ("own_nics", "target_nics", "sent"),
    [
        (1, 1, [[(0, 11)]]),
        (2, 2, [[(0, 7)], [(1, 4)]]),
        (1, 2, [[(0, 7), (1, 4)]]),
        (2, 1, [[(0, 11)], []]),
        (3, 2, [[(0, 7)], [(1, 4)], []]),
        (2, 3, [[(0, 4), (2, 3)], [(1, 4)]]),
    ],
)
def test_nics_take_stripes_of_the_blocks(own_nics: int, target_nics: int, sent: list[list[tuple[int, int]]]) -> None:
    """(target NIC, blocks) of each write, for each source NIC."""
    side = announced_long(LONG_TWO, own_nics, target_nics)
    for number, port in enumerate(side.ports):
        rank, nic = divmod(number, own_nics)
        told = [(NIC_IMMEDIATES.index(write.immediate), len(write.source_pages)) for write in port.writes]
        assert told == sent[nic]
        assert [write.key for write in port.writes] == [70 + 100 * to for to, _ in sent[nic]]
        assert {write.watch for write in port.writes} <= {Watch(90 + number)}
        assert {write.source_base for write in port.writes} <= {4096 * (1 + rank)}
        for index in range(len(port.writes)):
            port.done(index)
    (end,) = side.group.poll()
    assert isinstance(end, Sent)
    assert sum(end.num_pieces) == 2 * 2 * 2 * 11, "layers, source ranks, planes, blocks"
    assert len(end.num_pieces) == target_nics
    assert side.group.check() == []


def test_a_nic_whose_blocks_are_all_sent_is_done_before_the_others() -> None:
    side = connected(LONG, LONG, 2, 2)
    side.group.accept(long_ticket(2, seed=1), DECODER, LONG)
    side.group.announce(R, 0, 32, last=False, pages=[PageId(it) for it in range(8)], counter_base=0)
    side.group.announce(R, 32, 44, last=True, pages=[PageId(it) for it in range(8, 11)], counter_base=2)
    assert [[len(write.source_pages) for write in port.writes] for port in side.ports] == [[4], [4, 3]]
    side.ports[0].done(0)
    side.ports[1].done(0)
    assert side.group.poll() == []
    side.ports[1].done(1)
    assert [type(event) for event in side.group.poll()] == [Sent]


def test_a_write_that_fails_on_one_nic_stops_the_other() -> None:
    side = announced_long(LONG, 2, 2)
    side.ports[1].done(0, errno.ENETDOWN, num_pieces=3)
    assert side.group.poll() == []
    assert len(side.ports[0].cancelled) == 1
    side.ports[0].done(0, errno.ECANCELED, num_pieces=5)
    (stopped,) = side.group.poll()
    assert isinstance(stopped, Stopped)
    assert stopped.num_pieces == (5, 3)
    assert stopped.reason.startswith("a write to decode/0 rank 0 NIC 1 failed: ")


def test_a_broken_nic_breaks_the_set() -> None:
    side = announced_long(LONG, 2, 2)
    side.ports[1].done(0, errno.EIO, num_pieces=0)
    side.ports[1].script.append(PortFailed(errno.EIO))
    assert side.group.poll() == [PortBroken(errno.EIO)]
    side.ports[0].done(0, errno.ECANCELED, num_pieces=0)
    assert [type(event) for event in side.group.poll()] == [Stopped]
    with pytest.raises(FabricError, match="port failed"):
        side.group.accept(long_ticket(2), DECODER, LONG)


def test_tickets_need_every_nic() -> None:
    side = connected(LONG, LONG, 2, 1)
    with pytest.raises(BadTicket, match="rank 0 has granted us no memory key for its NIC 1"):
        side.group.accept(long_ticket(2), DECODER, LONG)
    side.group.connect(DECODER, grant(0, nic=1))
    with pytest.raises(BadTicket, match="immediates: 3 for 1 ranks with 2 NICs each"):
        side.group.accept(long_ticket(2, immediates=NIC_IMMEDIATES[:3]), DECODER, LONG)
    for num_nics in (0, -1):
        with pytest.raises(BadTicket, match="immediates: "):
            side.group.accept(long_ticket(num_nics, immediates=NIC_IMMEDIATES[:1]), DECODER, LONG)
    side.group.accept(long_ticket(2), DECODER, LONG)
    side.group.stop(R)
    assert [type(event) for event in side.group.poll()] == [Stopped]
    again = (pack(0, 4), NIC_IMMEDIATES[1])
    with pytest.raises(BadTicket, match="rank 0 NIC 1 was used by an earlier ticket"):
        side.group.accept(long_ticket(2, immediates=again), DECODER, LONG)


def test_every_nic_counts_what_is_dealt_to_it() -> None:
    side = Side(LONG_TWO, 2)
    assert [(it.rank, it.nic) for it in side.group.grants(PREFILLER, REPLICA)] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    immediates = side.group.arm(R, PREFILLER, LONG_TWO, 0, 44, seed=0)
    assert len(immediates) == 4
    assert [next(iter(port.expected.values())) for port in side.ports] == [2 * 7, 2 * 4, 2 * 7, 2 * 4]
    for port, immediate in zip(side.ports, immediates, strict=True):
        assert side.group.poll() == []
        port.reach(immediate)
    (arrived,) = side.group.poll()
    assert isinstance(arrived, Arrived)
    assert (arrived.num_pieces, arrived.num_bytes) == (44, 44 * LONG_TWO.layout.page_bytes)


def test_a_nic_that_nothing_is_dealt_to_is_not_waited_for() -> None:
    side = Side(LONG, 2)
    side.group.grant(PREFILLER)
    first, _ = side.group.arm(R, PREFILLER, LONG, 0, 8, seed=0)
    assert [list(port.expected.values()) for port in side.ports] == [[4], []]
    assert side.group.poll() == []
    side.ports[0].reach(first, 5.0, 6.0)
    (arrived,) = side.group.poll()
    assert isinstance(arrived, Arrived)
    assert (arrived.num_pieces, arrived.first_s, arrived.last_s) == (4, 5.0, 6.0)
    side.group.forget(R)
    first, _ = side.group.arm(R, PREFILLER, LONG, 0, 8, seed=0)
    side.group.stopped(R, first, (0, 0))
    side.ports[0].reach(first)
    assert side.group.poll() == [Drained(request=R, immediate=first, fenced=False)]
    assert side.group.check() == []


# The target.


def armed(shape: KvShape, source: KvShape) -> tuple[Side, tuple[Immediate, ...]]:
    side = Side(shape)
    assert len(side.group.grant(PREFILLER)) == shape.tp
    return side, side.group.arm(R, PREFILLER, source, 0, 14, seed=0)


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
    side.group.arm(R, PREFILLER, FOUR, 0, 14, seed=0)


def test_drained_when_the_last_rank_is() -> None:
    side, immediates = armed(TWO, TWO)
    side.ports[1].reach(immediates[1])
    side.group.stopped(R, immediates[0], (3, 8))
    assert side.group.poll() == []
    side.ports[0].reach(immediates[0])
    assert side.group.poll() == [Drained(request=R, immediate=immediates[0], fenced=False)]
    assert side.group.check() == []
    side.group.arm(R, PREFILLER, TWO, 0, 14, seed=0)


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
            side.group.arm(R, PREFILLER, TWO, 0, 14, seed=0)
    assert side.ports[0].expected == {}
    assert side.group.poll() == []
    assert side.group.check() == []
    side.group.arm(R, PREFILLER, TWO, 0, 14, seed=0)


def test_shapes_that_do_not_fit_are_not_armed() -> None:
    side = Side(TWO)
    side.group.grant(PREFILLER)
    with pytest.raises(InvariantBroken, match="num_planes"):
        side.group.arm(R, PREFILLER, make_shape(2, 4, num_planes=1), 0, 14, seed=0)


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
