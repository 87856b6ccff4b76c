"""The faults of the simulated network, and that a run can be repeated."""

from __future__ import annotations

import errno

from fabric_bench import NUM_LAYERS, Bench, shuffled_pages

from pdd.fabric.immediate import pack
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.port import CountReached, PortFailed, StrayWrite, Token, WriteDone

IMMEDIATE = pack(1, 2)
PAGES = shuffled_pages(seed=5, number=4)
ALL_PIECES = NUM_LAYERS * len(PAGES)


def make(seed: int = 1, reorder: bool = True) -> tuple[LoopbackFabric, Bench]:
    """A network in which one write is under way."""
    fabric = LoopbackFabric(seed, reorder)
    bench = Bench("loopback", fabric.open_port, lambda: None)
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    bench.source_port.write(bench.spec(1, IMMEDIATE, PAGES))
    return fabric, bench


def test_nothing_moves_by_itself() -> None:
    fabric, bench = make()
    assert bench.source_port.events() == bench.target_port.events() == []
    assert fabric.step()
    assert fabric.num_in_flight == ALL_PIECES
    fabric.run()
    assert fabric.num_in_flight == 0
    assert not fabric.step()


def test_equal_seeds_give_equal_runs_and_others_do_not() -> None:
    def order(seed: int, reorder: bool = True) -> list[int]:
        fabric, bench = make(seed, reorder)
        arrived = []
        while fabric.step():
            arrived.append(bench.target_port.arrived(IMMEDIATE))
        bench.close()
        return arrived

    assert order(1) == order(1)
    assert len({tuple(order(seed)) for seed in range(5)}) > 1
    assert order(1, reorder=False) == order(2, reorder=False)


def test_local_completion_is_not_placement() -> None:
    fabric, bench = make()
    fabric.hold(bench.target_port)
    fabric.run()
    assert bench.source_port.events() == [WriteDone(Token(1), 0, ALL_PIECES, ALL_PIECES * 4096)]
    assert bench.target_port.arrived(IMMEDIATE) == 0
    fabric.let_go(bench.target_port)
    fabric.run()
    assert isinstance(bench.target_port.events()[0], CountReached)
    bench.assert_copied(PAGES)


def test_the_source_is_read_at_local_completion() -> None:
    """Whoever reuses a page before its WriteDone sends the wrong bytes, as on a real fabric."""
    fabric, bench = make()
    bench.source.map[:] = bytes(len(bench.source.map))
    fabric.run()
    assert bench.target.page(0, PAGES[0][1]) == bytes(4096)


def test_lost_pieces_complete_at_the_source_and_are_missed_at_the_target() -> None:
    fabric, bench = make()
    fabric.drop(3)
    fabric.run()
    assert bench.source_port.events() == [WriteDone(Token(1), 0, ALL_PIECES, ALL_PIECES * 4096)]
    assert bench.target_port.events() == []
    assert bench.target_port.arrived(IMMEDIATE) == ALL_PIECES - 3


def test_doubled_pieces_beyond_the_goal_are_strays() -> None:
    fabric, bench = make()
    fabric.duplicate(2)
    fabric.run()
    reached, strays = bench.target_port.events()
    assert isinstance(reached, CountReached)
    assert strays == StrayWrite(IMMEDIATE, 2)


def test_a_dead_peer_neither_completes_nor_arrives() -> None:
    fabric, bench = make()
    fabric.kill(bench.target_port)
    fabric.run()
    assert bench.source_port.events() == []
    bench.source_port.drop_peer(bench.peer)
    assert bench.source_port.events() == [
        WriteDone(Token(1), errno.ECANCELED, ALL_PIECES, ALL_PIECES * 4096),
    ]


def test_a_broken_port_ends_its_writes_and_takes_no_more() -> None:
    fabric, bench = make()
    fabric.fail(bench.source_port, errno.EIO)
    assert bench.source_port.events() == [WriteDone(Token(1), errno.EIO, 0, 0), PortFailed(errno.EIO)]
    bench.source_port.write(bench.spec(2, IMMEDIATE, PAGES))
    assert bench.source_port.events() == [WriteDone(Token(2), errno.EIO, 0, 0)]
