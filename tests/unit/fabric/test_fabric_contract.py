"""What every port must do, tried on each of them."""

from __future__ import annotations

import errno
import os
import select

import msgspec
import pytest
from fabric_bench import ARENA_BYTES, NUM_LAYERS, NUM_PAGES, PAGE_BYTES, Bench, shuffled_pages

from pdd.base.errors import FabricBusy, FabricError
from pdd.fabric.immediate import pack
from pdd.fabric.port import CountReached, CudaMemory, Event, Piece, StrayWrite, Token, WriteDone

IMMEDIATE = pack(5, 17)
ALL_PIECES = NUM_LAYERS * NUM_PAGES


def done(token: int, pieces: int, error: int = 0) -> WriteDone:
    return WriteDone(Token(token), error, pieces, pieces * PAGE_BYTES)


def ends(events: list[Event]) -> list[Event]:
    """Without the times, by token."""
    plain = [
        msgspec.structs.replace(event, first_s=None) if isinstance(event, WriteDone) else event for event in events
    ]
    return sorted(plain, key=lambda event: getattr(event, "token", -1))


def test_permuted_pages_arrive_and_are_counted(bench: Bench) -> None:
    pages = shuffled_pages(seed=3)
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    bench.source_port.write(bench.spec(1, IMMEDIATE, pages))
    (reached,) = bench.wait(bench.target_port)
    assert isinstance(reached, CountReached)
    assert reached.immediate == IMMEDIATE
    assert reached.first_s <= reached.last_s
    bench.assert_copied(pages)
    assert ends(bench.wait(bench.source_port)) == [done(1, ALL_PIECES)]
    assert bench.target_port.arrived(IMMEDIATE) == ALL_PIECES


def test_neighbouring_pages_may_be_joined_but_count_each(bench: Bench) -> None:
    pages = [(i, i) for i in range(NUM_PAGES)]
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    bench.source_port.write(bench.spec(1, IMMEDIATE, pages))
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)
    bench.assert_copied(pages)
    assert bench.target_port.arrived(IMMEDIATE) == ALL_PIECES


def test_pieces_copy_only_their_bytes(bench: Bench) -> None:
    pieces = (Piece(0, 1024, 512), Piece(2048, 3072, 700))
    bench.target_port.expect(IMMEDIATE, 2 * 2 * NUM_LAYERS)
    bench.source_port.write(bench.spec(1, IMMEDIATE, [(4, 9), (6, 2)], pieces=pieces))
    bench.wait(bench.target_port)
    for layer in range(NUM_LAYERS):
        for source, target in ((4, 9), (6, 2)):
            expected = bytearray(PAGE_BYTES)
            expected[1024:1536] = bench.source.page(layer, source)[:512]
            expected[3072:3772] = bench.source.page(layer, source)[2048:2748]
            assert bench.target.page(layer, target) == bytes(expected)


def armed_write(bench: Bench, wake_fd: int, counter: int, token: int = 1) -> None:
    """Whole pages in all layers, none of them computed yet."""
    watch = bench.source_port.watch(bench.source.counter_address, wake_fd)
    bench.source.raise_counter(counter)
    pages = shuffled_pages(seed=4)
    bench.source_port.write(bench.spec(token, IMMEDIATE, pages, watch=watch, counter_base=counter))


@pytest.mark.parametrize("woken", [True, False])
def test_a_layer_is_not_written_before_the_counter_says_so(bench: Bench, woken: bool) -> None:
    wake_fd = os.eventfd(0) if woken else -1
    bench.target_port.expect(IMMEDIATE, ALL_PIECES + 1)
    armed_write(bench, wake_fd, counter=100)
    for layer in range(NUM_LAYERS):
        bench.probe()
        assert bench.target_port.arrived(IMMEDIATE) == layer * NUM_PAGES
        bench.source.raise_counter(101 + layer)
        if woken:
            os.eventfd_write(wake_fd, 1)
        bench.probe_until(lambda: bench.target_port.arrived(IMMEDIATE) >= (layer + 1) * NUM_PAGES)  # noqa: B023
        if layer + 1 < NUM_LAYERS:
            assert bench.target_port.arrived(IMMEDIATE) == (layer + 1) * NUM_PAGES
            assert bench.left(bench.source_port) == []
    assert ends(bench.wait(bench.source_port)) == [done(1, ALL_PIECES)]
    bench.assert_copied([pair for pair in shuffled_pages(seed=4) if pair[1]])  # a probe has written page 0
    if woken:
        os.close(wake_fd)


def test_cancel_reports_what_was_posted_and_the_target_counts_just_that(bench: Bench) -> None:
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    armed_write(bench, -1, counter=0)
    bench.source.raise_counter(1)
    bench.probe_until(lambda: bench.target_port.arrived(IMMEDIATE) == NUM_PAGES)
    bench.source_port.cancel(Token(1))
    assert ends(bench.wait(bench.source_port)) == [done(1, NUM_PAGES, errno.ECANCELED)]
    bench.source.raise_counter(NUM_LAYERS)
    bench.probe()
    assert bench.target_port.arrived(IMMEDIATE) == NUM_PAGES
    bench.target_port.change_expected(IMMEDIATE, NUM_PAGES)
    (reached,) = bench.wait(bench.target_port)
    assert isinstance(reached, CountReached)


@pytest.mark.parametrize("attempt", range(5))
def test_cancel_in_full_flight_leaves_both_sides_with_one_number(bench: Bench, attempt: int) -> None:
    immediate = pack(6, attempt)
    bench.target_port.expect(immediate, 40 * ALL_PIECES + 1)
    pages = [pair for seed in range(40) for pair in shuffled_pages(seed)]
    bench.source_port.write(bench.spec(1, immediate, pages))
    if attempt:
        bench.probe(pack(7, attempt))
    bench.source_port.cancel(Token(1))
    (end,) = bench.wait(bench.source_port)
    assert isinstance(end, WriteDone)
    assert end.error == (errno.ECANCELED if end.num_pieces < 40 * ALL_PIECES else 0)
    bench.target_port.change_expected(immediate, end.num_pieces)
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)
    bench.probe()
    assert bench.target_port.arrived(immediate) == end.num_pieces


def test_cancel_of_an_unknown_or_ended_write_is_ignored(bench: Bench) -> None:
    bench.source_port.cancel(Token(99))
    bench.probe()
    bench.source_port.cancel(Token(int(IMMEDIATE)))
    bench.settle()
    assert bench.left(bench.source_port) == []


def test_a_new_goal_below_the_count_is_reached_at_once_and_only_once(bench: Bench) -> None:
    bench.target_port.expect(IMMEDIATE, 1000)
    bench.source_port.write(bench.spec(1, IMMEDIATE, [(1, 1), (2, 2)]))
    bench.wait(bench.source_port)
    bench.probe()
    bench.target_port.change_expected(IMMEDIATE, 5)
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)
    bench.target_port.change_expected(IMMEDIATE, 2)
    bench.probe()
    assert bench.target_port.unexpect(IMMEDIATE) == 2 * NUM_LAYERS


def test_a_goal_of_nothing_is_reached_at_once(bench: Bench) -> None:
    bench.target_port.expect(IMMEDIATE, 10)
    bench.target_port.change_expected(IMMEDIATE, 0)
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)


def test_goals_are_of_one_generation(bench: Bench) -> None:
    port = bench.target_port
    port.expect(IMMEDIATE, 10)
    with pytest.raises(FabricError) as refused:
        port.expect(pack(5, 18), 10)
    assert refused.value.errno == errno.EEXIST
    with pytest.raises(FabricError) as unknown:
        port.change_expected(pack(5, 18), 3)
    assert unknown.value.errno == errno.ENOENT
    assert port.unexpect(pack(5, 18)) == 0
    assert port.unexpect(IMMEDIATE) == 0
    port.expect(pack(5, 18), 10)


def test_unexpected_pieces_are_strays_and_never_progress(bench: Bench) -> None:
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    late = pack(5, 16)
    bench.source_port.write(bench.spec(1, late, [(0, 1), (1, 2)]))
    bench.wait(bench.source_port)
    strays = 0
    while strays < 2 * NUM_LAYERS:
        for event in bench.wait(bench.target_port):
            assert isinstance(event, StrayWrite)
            assert event.immediate == late
            strays += event.num_pieces
    assert strays == 2 * NUM_LAYERS
    assert bench.target_port.arrived(IMMEDIATE) == 0
    assert bench.target_port.arrived(late) == 0


def test_a_full_port_says_busy_and_takes_nothing(bench: Bench) -> None:
    port = bench.open_port(max_writes=4)
    memory = port.register(bench.source.address, ARENA_BYTES, bench.source.fd).memory
    peer = port.add_peer(bench.target_memory.address)
    bench.target_port.expect(IMMEDIATE, 5 * NUM_LAYERS)
    for token in range(4):
        port.write(bench.spec(token, IMMEDIATE, [(0, token)], peer=peer, memory=memory))
    with pytest.raises(FabricBusy):
        port.write(bench.spec(4, IMMEDIATE, [(0, 5)], peer=peer, memory=memory))
    tokens = {event.token for event in bench.wait(port, 4) if isinstance(event, WriteDone) and not event.error}
    assert tokens == {0, 1, 2, 3}
    port.write(bench.spec(4, IMMEDIATE, [(0, 5)], peer=peer, memory=memory))
    assert ends(bench.wait(port)) == [done(4, NUM_LAYERS)]
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)
    port.close()


def test_dropping_a_peer_ends_its_writes_and_no_others(bench: Bench) -> None:
    watch = bench.source_port.watch(bench.source.counter_address, -1)
    other = bench.source_port.add_peer(bench.target_memory.address)
    for token in range(50):
        bench.source_port.write(bench.spec(token, IMMEDIATE, shuffled_pages(token), watch=watch))
    bench.target_port.expect(IMMEDIATE, NUM_LAYERS)
    bench.source_port.write(bench.spec(100, IMMEDIATE, [(3, 3)], peer=other))
    assert ends(bench.wait(bench.source_port)) == [done(100, NUM_LAYERS)]
    bench.source_port.drop_peer(bench.peer)
    assert ends(bench.wait(bench.source_port, 50)) == [done(token, 0, errno.ECANCELED) for token in range(50)]
    with pytest.raises(FabricError):
        bench.source_port.write(bench.spec(1, IMMEDIATE, [(0, 0)]))
    with pytest.raises(FabricError):
        bench.source_port.drop_peer(bench.peer)
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)


def test_unwatch_ends_what_is_armed(bench: Bench) -> None:
    watch = bench.source_port.watch(bench.source.counter_address, -1)
    bench.source_port.write(bench.spec(1, IMMEDIATE, [(0, 0)], watch=watch))
    bench.source_port.unwatch(watch)
    assert ends(bench.wait(bench.source_port)) == [done(1, 0, errno.ECANCELED)]


def test_close_ends_every_write_and_keeps_the_events(bench: Bench) -> None:
    watch = bench.source_port.watch(bench.source.counter_address, -1)
    for token in range(20):
        bench.source_port.write(bench.spec(token, IMMEDIATE, [(0, 0)], watch=watch))
    bench.source_port.close()
    assert ends(bench.left(bench.source_port)) == [done(token, 0, errno.ECANCELED) for token in range(20)]
    bench.source_port.close()
    with pytest.raises(FabricError):
        bench.source_port.write(bench.spec(1, IMMEDIATE, [(0, 0)]))


def test_after_release_nothing_is_placed(bench: Bench) -> None:
    bench.probe()
    bench.target_port.release(bench.target_memory.memory)
    before = bytes(bench.target.map)
    bench.target_port.expect(IMMEDIATE, ALL_PIECES)
    bench.source_port.write(bench.spec(1, IMMEDIATE, shuffled_pages(seed=8)))
    bench.settle()
    # Another registration and another peer still work: the fence hits one peer only.
    memory = bench.target_port.register(bench.target.address, ARENA_BYTES)
    peer = bench.source_port.add_peer(memory.address)
    ours = pack(9, 1)
    bench.target_port.expect(ours, NUM_LAYERS)
    bench.source_port.write(bench.spec(2, ours, [(0, 0)], peer=peer))
    assert isinstance(bench.wait(bench.target_port)[0], CountReached)
    bench.source_port.drop_peer(bench.peer)
    assert bench.target_port.arrived(IMMEDIATE) == 0
    assert bytes(bench.target.map) == before


def test_a_gpu_s_memory_is_never_taken_for_the_host_s(bench: Bench) -> None:
    for cuda in (CudaMemory(0), CudaMemory(3, dmabuf_fd=bench.source.fd)):
        with pytest.raises(FabricError) as refused:
            bench.source_port.register(bench.source.address, ARENA_BYTES, cuda=cuda)
        assert refused.value.errno == errno.EOPNOTSUPP
    bench.probe()


def test_addresses_differ_for_each_registration_of_the_same_bytes(bench: Bench) -> None:
    made = [bench.target_port.register(bench.target.address, ARENA_BYTES) for _ in range(8)]
    assert len({each.address for each in made}) == 8


@pytest.mark.parametrize(
    "changes",
    [
        {"source_pages": (NUM_PAGES,), "target_pages": (0,)},
        {"source_pages": (0, 1), "target_pages": (0,)},
        {"source_pages": (), "target_pages": ()},
        {"pieces": ()},
        {"num_layers": 0},
        {"num_layers": NUM_LAYERS + 1},
        {"target_base": PAGE_BYTES, "target_pages": (NUM_PAGES - 1,)},
        {"peer": 77},
        {"memory": 77},
        {"watch": 77},
    ],
    ids=str,
)
def test_a_write_that_makes_no_sense_is_refused_whole(bench: Bench, changes: dict[str, object]) -> None:
    with pytest.raises(FabricError):
        bench.source_port.write(bench.spec(1, IMMEDIATE, [(0, 0)], **changes))
    bench.probe()


def test_an_address_of_another_kind_is_refused(bench: Bench) -> None:
    for address in (b"", b"x", os.urandom(16), os.urandom(300)):
        with pytest.raises(FabricError):
            bench.source_port.add_peer(address)


def test_the_descriptor_is_readable_just_while_events_wait(bench: Bench) -> None:
    assert not select.select([bench.source_port], [], [], 0)[0]
    bench.source_port.write(bench.spec(1, IMMEDIATE, [(0, 0)]))
    bench.wait(bench.source_port)
    assert not select.select([bench.source_port], [], [], 0)[0]
