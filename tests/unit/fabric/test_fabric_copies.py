"""Copies within one machine, and what takes their place where they are not to be had: the NICs."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from child_process import Child
from fabric_bench import (
    ARENA_BYTES,
    NUM_LAYERS,
    NUM_PAGES,
    PAGE_BYTES,
    PATIENCE_S,
    Bench,
    make_bench,
    shuffled_pages,
)

from pdd.fabric.immediate import pack
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.port import CountReached, PeerInfo, WriteDone

NAME_BYTE, TOKEN_BYTE = -32, -16
"""Of the address that a registration gives: where its port listens for copiers, and who may ask for copies into it."""


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = make_bench("copy")
    yield made
    made.close()


def sent_bytes(bench: Bench) -> int:
    """Through NICs."""
    assert isinstance(bench.source_port, LibfabricPort)
    return bench.source_port.nic_statistics(0)["num_bytes"]


def copied_bytes(bench: Bench) -> int:
    assert isinstance(bench.target_port, LibfabricPort)
    return bench.target_port.statistics()["num_copied_bytes"]


def num_failed_paths(bench: Bench) -> int:
    assert isinstance(bench.source_port, LibfabricPort)
    return bench.source_port.statistics()["num_failed_paths"]


def deliver(bench: Bench, number: int) -> None:
    pages = shuffled_pages(number)
    immediate = pack(1, number)
    bench.target_port.expect(immediate, NUM_LAYERS * NUM_PAGES)
    bench.source_port.write(bench.spec(number, immediate, pages))
    (end,) = bench.wait(bench.source_port, matches=lambda event: isinstance(event, WriteDone))
    assert end == WriteDone(end.token, 0, NUM_LAYERS * NUM_PAGES, ARENA_BYTES, end.first_s)  # type: ignore[union-attr]
    bench.wait(bench.target_port, matches=lambda event: isinstance(event, CountReached))
    bench.assert_copied(pages)


def connect(bench: Bench, damaged_byte: int) -> None:
    address = bytearray(bench.target_memory.address)
    address[damaged_byte] ^= 1
    bench.peer = bench.source_port.add_peer(bytes(address))


def test_copies_leave_the_nics_alone(bench: Bench) -> None:
    for number in range(3):
        deliver(bench, number)
    assert (copied_bytes(bench), sent_bytes(bench)) == (3 * ARENA_BYTES, 0)
    assert bench.source_port.peer_info(bench.peer) == PeerInfo(copies=True, num_paths=1, num_open=1)


def test_memory_that_cannot_be_mapped_goes_over_nics_while_other_is_copied(bench: Bench) -> None:
    plain = bench.source_port.register(bench.source.address, ARENA_BYTES).memory
    memories = bench.source_memory.memory, plain
    for number in range(6):
        immediate = pack(10 + number, 0)
        bench.target_port.expect(immediate, NUM_LAYERS * NUM_PAGES)
        pages, memory = shuffled_pages(number), memories[number % 2]
        bench.source_port.write(bench.spec(number, immediate, pages, memory=memory))
    ends = bench.wait(bench.source_port, 6, lambda event: isinstance(event, WriteDone))
    assert not any(end.error for end in ends if isinstance(end, WriteDone))
    bench.wait(bench.target_port, 6, lambda event: isinstance(event, CountReached))
    assert (copied_bytes(bench), sent_bytes(bench)) == (3 * ARENA_BYTES, 3 * ARENA_BYTES)
    assert num_failed_paths(bench) == 0


@pytest.mark.parametrize("damaged_byte", [NAME_BYTE, TOKEN_BYTE], ids=["nobody listens", "not let in"])
def test_a_refused_connection_costs_no_write(bench: Bench, damaged_byte: int) -> None:
    connect(bench, damaged_byte)
    for number in range(5):
        deliver(bench, number)
    assert (copied_bytes(bench), sent_bytes(bench)) == (0, 5 * ARENA_BYTES)
    assert bench.source_port.peer_info(bench.peer) == PeerInfo(copies=False, num_paths=1, num_open=1)


def test_a_target_without_copies_is_reached_over_nics(bench: Bench) -> None:
    other = LibfabricPort("net,tcp", copies=False)
    bench.target_port.close()
    bench.target_port = other
    bench.target_memory = other.register(bench.target.address, ARENA_BYTES)
    bench.peer = bench.source_port.add_peer(bench.target_memory.address)
    deliver(bench, 1)
    assert not bench.source_port.peer_info(bench.peer).copies
    assert sent_bytes(bench) == ARENA_BYTES


@pytest.mark.slow
def test_a_killed_target_is_not_waited_for(bench: Bench) -> None:
    """Neither its socket nor its NIC answers any more."""
    victim = Child("copy", ARENA_BYTES, 0)
    peer = bench.source_port.add_peer(victim.address)
    immediate = pack(3, 0)
    bench.source_port.write(bench.spec(0, immediate, shuffled_pages(0), peer=peer))
    bench.wait(bench.source_port)
    assert bench.source_port.peer_info(peer).copies
    victim.kill()
    deadline_s = time.monotonic() + PATIENCE_S
    token, error = 1, 0
    while not error:
        assert time.monotonic() < deadline_s
        bench.source_port.write(bench.spec(token, immediate, shuffled_pages(token), peer=peer))
        (end,) = bench.wait(bench.source_port)
        assert isinstance(end, WriteDone)
        token, error = token + 1, end.error
    assert not bench.source_port.peer_info(peer).copies
    assert PAGE_BYTES * end.num_pieces == end.num_bytes
    deliver(bench, 9)
