"""An executor's cores and its arena's NUMA node; on a machine with one node, what the kernel was told of it."""

from __future__ import annotations

import multiprocessing
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from executors import executor_config

from pdd.base.errors import OperatorError
from pdd.engine import worker
from pdd.engine.affinity import node_of, pin, prefer_node, preferred_node
from pdd.memory.arena import Arena
from pdd.memory.layout import KvLayout
from pdd.topology.discover_sysfs import NumaNode

TWO = (NumaNode(0, ((0, 4), (1, 5))), NumaNode(1, ((2, 6), (3, 7))))
LAYOUT = KvLayout(num_layers=2, num_kv_heads=2, head_dim=64, page_tokens=16, dtype="float32", num_pages=64)
HAS_NUMA = Path("/sys/devices/system/node/node0").is_dir()


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create(LAYOUT)
    yield arena
    arena.close()


@pytest.mark.parametrize(
    ("cpus", "node"), [((0,), 0), ((1, 4, 5), 0), ((3, 6), 1), ((1, 2), None), ((9,), None), ((0, 1, 2, 3), None)]
)
def test_cores_of_one_node_have_it(cpus: tuple[int, ...], node: int | None) -> None:
    assert node_of(cpus, TWO) == node


def test_with_one_node_there_is_nothing_to_choose() -> None:
    assert node_of((0,), TWO[:1]) is None


@pytest.mark.skipif(not HAS_NUMA, reason="this kernel knows no NUMA nodes")
def test_the_node_holds_for_every_mapping_of_the_arena(arena: Arena) -> None:
    assert preferred_node(arena.address) is None
    if not prefer_node(arena.address, arena.num_bytes, 0):
        pytest.skip("this container refuses mbind")
    other = Arena.map(os.dup(arena.fd), LAYOUT)
    try:
        assert preferred_node(arena.address) == 0
        assert preferred_node(other.address) == 0
        other.buffer()[:4] = b"kept"
        assert bytes(arena.buffer()[:4]) == b"kept"
    finally:
        other.close()


@pytest.mark.parametrize("node", [1000, 5000, -1])
def test_a_node_that_there_is_not_changes_nothing(arena: Arena, node: int) -> None:
    assert not prefer_node(arena.address, arena.num_bytes, node)
    assert preferred_node(arena.address) is None
    arena.buffer()[:4] = b"kept"


def test_on_other_processors_memory_comes_as_it_did(arena: Arena, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not prefer_node(arena.address, arena.num_bytes, 0)
    assert preferred_node(arena.address) is None


@pytest.mark.skipif(not HAS_NUMA, reason="this kernel knows no NUMA nodes")
def test_an_executor_places_its_arena(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = executor_config(tmp_path, tmp_path / "meet")
    pinned = msgspec.structs.replace(config, cores=(1, 5), replica="p/0")
    monkeypatch.setattr(worker, "numa_nodes", lambda: TWO[:1])
    worker._place(arena, pinned)
    monkeypatch.setattr(worker, "numa_nodes", lambda: TWO)
    worker._place(arena, msgspec.structs.replace(pinned, cores=()))
    assert preferred_node(arena.address) is None
    worker._place(arena, pinned)
    if refused := capsys.readouterr().err:
        assert "p/0: the system refuses to keep the KV memory on NUMA node 0" in refused
    else:
        assert preferred_node(arena.address) == 0
    monkeypatch.setattr(worker, "numa_nodes", lambda: (TWO[0], NumaNode(999, ((9,),))))
    worker._place(arena, msgspec.structs.replace(pinned, cores=(9,)))
    assert "NUMA node 999 (mbind): in a container" in capsys.readouterr().err


def test_pinning_to_cores_that_are_not_there_is_told() -> None:
    with pytest.raises(OperatorError, match=r"p/0: cannot run on cores \[99999\]: .*; this machine allows \["):
        pin("p/0", (99999,))


def test_pinning_holds() -> None:
    core = max(os.sched_getaffinity(0))
    queue = multiprocessing.get_context("spawn").Queue()
    process = multiprocessing.get_context("spawn").Process(target=_pinned, args=(core, queue))
    process.start()
    assert queue.get(timeout=60) == {core}
    process.join()


def _pinned(core: int, queue: multiprocessing.Queue[set[int]]) -> None:
    pin("p/0", (core,))
    queue.put(os.sched_getaffinity(0))
