"""What only a second process can show: a peer that dies, and one that comes back to life too late."""

from __future__ import annotations

import errno
import os
import select
import signal
import time
from collections.abc import Iterator

import pytest
from child_process import Child
from fabric_bench import ARENA_BYTES, NUM_LAYERS, NUM_PAGES, PATIENCE_S, Bench, make_bench, shuffled_pages

from pdd.base.ids import Immediate
from pdd.fabric.port import WriteDone


@pytest.fixture(params=["tcp", "two-nics", "copy", "shm"])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    made = make_bench(request.param)
    yield made
    made.close()


def test_a_killed_peer_ends_when_dropped_and_others_are_served(bench: Bench) -> None:
    victim = Child(bench.kind, ARENA_BYTES, 0)
    peer = bench.source_port.add_peer(victim.address)
    immediate = Immediate(0)
    bench.source_port.write(bench.spec(0, immediate, shuffled_pages(0), peer=peer))
    (first,) = bench.wait(bench.source_port)
    assert isinstance(first, WriteDone)
    os.kill(victim.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, victim.process.pid, os.WSTOPPED)
    for token in range(1, 2000):
        bench.source_port.write(bench.spec(token, immediate, shuffled_pages(token), peer=peer))
    victim.kill()
    for _ in range(3):
        bench.probe()
    bench.source_port.drop_peer(peer)
    ends = [first, *bench.wait(bench.source_port, 1999)]
    assert {end.token for end in ends} == set(range(2000))
    assert {end.error for end in ends} & {errno.ECANCELED, errno.ECONNABORTED, errno.ECONNRESET}
    for end in ends:
        assert end.error or end.num_pieces == NUM_LAYERS * NUM_PAGES
    bench.probe()
    assert bench.left(bench.source_port) == []


@pytest.mark.parametrize("kind", ["tcp", "two-nics", "copy"])
def test_a_stopped_peer_that_wakes_after_the_fence_writes_nothing(kind: str) -> None:
    """SIGSTOP hits it in the middle of a message: a closed key alone would let the rest in."""
    bench = make_bench(kind)
    num_pages, page_bytes = NUM_LAYERS * NUM_PAGES * 4096 // (128 * 1024), 128 * 1024
    writer = Child(kind, ARENA_BYTES, 7)
    memory = bench.target_memory
    peer = writer.call("connect", address=memory.address.hex())
    bench.target_port.expect(Immediate(0), 1 << 20)
    writer.call("write", peer=peer, num_writes=500, num_pages=num_pages, page_bytes=page_bytes)
    deadline_s = time.monotonic() + PATIENCE_S
    while not bench.target_port.arrived(Immediate(0)) and time.monotonic() < deadline_s:
        select.select([bench.target_port], [], [], 0.01)
    os.kill(writer.process.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, writer.process.pid, os.WSTOPPED)
    bench.target_port.release(memory.memory)
    bench.target.map[:] = bytes(len(bench.target.map))
    os.kill(writer.process.pid, signal.SIGCONT)
    writer.call("ends", number=500, patience_s=0.5)
    writer.call("drop", peer=peer)
    bench.probe_with_fresh_memory()
    assert bytes(bench.target.map).count(0) == len(bench.target.map)
    writer.kill()
    bench.close()
