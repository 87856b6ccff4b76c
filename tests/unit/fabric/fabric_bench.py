"""One bench for every kind of port: two ports, memory on both sides, and a way to let time pass."""

from __future__ import annotations

import ctypes
import mmap
import random
import select
import time
from collections.abc import Callable, Sequence
from typing import Any

from pdd.base.ids import Immediate
from pdd.fabric.immediate import pack
from pdd.fabric.libfabric import LibfabricPort
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.port import CountReached, Event, FabricPort, Piece, Token, Write
from pdd.memory.arena import SharedMemory

PAGE_BYTES = 4096
NUM_PAGES = 64
NUM_LAYERS = 3
LAYER_BYTES = NUM_PAGES * PAGE_BYTES
ARENA_BYTES = NUM_LAYERS * LAYER_BYTES
PATIENCE_S = 20.0
PROBE = pack(4000, 1)


class Arena:
    """A memfd and its mapping, with a layer counter behind the pages."""

    def __init__(self, seed: int | None) -> None:
        self.fd = SharedMemory.make_fd("arena", ARENA_BYTES + mmap.PAGESIZE)
        self.map = mmap.mmap(self.fd, ARENA_BYTES + mmap.PAGESIZE)
        if seed is not None:
            self.map[:ARENA_BYTES] = random.Random(seed).randbytes(ARENA_BYTES)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._counter = ctypes.c_uint64.from_address(self.counter_address)

    @property
    def counter_address(self) -> int:
        return self.address + ARENA_BYTES

    def raise_counter(self, to: int) -> None:
        self._counter.value = to

    def page(self, layer: int, page: int) -> bytes:
        start = layer * LAYER_BYTES + page * PAGE_BYTES
        return self.map[start : start + PAGE_BYTES]


class Bench:
    """A source and a target port of one kind. `settle` gives a chance to what should not happen."""

    def __init__(self, kind: str, open_port: Callable[[int], Any], settle: Callable[[], None]) -> None:
        self.kind = kind
        self.settle = settle
        self._backlog: dict[int, list[Event]] = {}
        self._open = open_port
        self.source_port = self.open_port()
        self.target_port = self.open_port()
        self.source = Arena(seed=1)
        self.target = Arena(seed=None)
        self.source_memory = self.source_port.register(self.source.address, ARENA_BYTES, self.source.fd)
        self.target_memory = self.target_port.register(self.target.address, ARENA_BYTES)
        self.peer = self.source_port.add_peer(self.target_memory.address)

    def open_port(self, max_writes: int = 4096) -> FabricPort:
        port: FabricPort = self._open(max_writes)
        return port

    def spec(self, token: int, immediate: Immediate, pages: list[tuple[int, int]], **changes: Any) -> Write:
        """A write of whole pages in all layers, with `changes`."""
        fields = {
            "token": Token(token),
            "peer": self.peer,
            "memory": self.source_memory.memory,
            "immediate": immediate,
            "num_layers": NUM_LAYERS,
            "source_base": self.source.address,
            "source_layer_bytes": LAYER_BYTES,
            "source_page_bytes": PAGE_BYTES,
            "target_base": 0,
            "target_layer_bytes": LAYER_BYTES,
            "target_page_bytes": PAGE_BYTES,
            "source_pages": tuple(source for source, _ in pages),
            "target_pages": tuple(target for _, target in pages),
            "pieces": (Piece(0, 0, PAGE_BYTES),),
        }
        return Write(**{**fields, **changes})

    def left(self, port: FabricPort) -> list[Event]:
        """All events that nobody has waited for."""
        backlog = self._backlog.setdefault(id(port), [])
        backlog += port.events()
        return backlog

    def wait(self, port: FabricPort, number: int = 1, matches: Callable[[Event], bool] = lambda _: True) -> list[Event]:
        """The next `number` events of a port that match; the others stay for later."""
        deadline_s = time.monotonic() + PATIENCE_S
        while True:
            self.settle()
            backlog = self.left(port)
            found = [event for event in backlog if matches(event)][:number]
            if len(found) == number:
                backlog[:] = [event for event in backlog if all(event is not taken for taken in found)]
                return found
            assert self.kind != "loopback", f"the simulation stands still after {backlog}"
            assert time.monotonic() < deadline_s, f"only {backlog} after {PATIENCE_S} s"
            select.select([port], [], [], PATIENCE_S)

    def probe(self, immediate: Immediate = PROBE) -> None:
        """Sends one page and waits for it: what was posted to this peer before has been placed by then."""
        self.target_port.expect(immediate, NUM_LAYERS)
        self.source_port.write(self.spec(int(immediate), immediate, [(0, 0)]))
        self.wait(
            self.target_port, matches=lambda event: isinstance(event, CountReached) and event.immediate == immediate
        )
        (end,) = self.wait(self.source_port, matches=lambda event: getattr(event, "token", None) == int(immediate))
        assert getattr(end, "error", None) == 0
        self.target_port.unexpect(immediate)

    def probe_with_fresh_memory(self) -> None:
        """As `probe`, after the first registration was released: an empty page from and to memory of its own."""
        arena = Arena(seed=None)
        self.source_memory = self.source_port.register(arena.address, ARENA_BYTES, arena.fd)
        self.target_memory = self.target_port.register(arena.address, ARENA_BYTES)
        self.peer, self.source = self.source_port.add_peer(self.target_memory.address), arena
        self.probe()

    def probe_until(self, holds: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < deadline_s
            self.probe()

    def assert_copied(self, pages: list[tuple[int, int]]) -> None:
        for layer in range(NUM_LAYERS):
            for source, target in pages:
                assert self.target.page(layer, target) == self.source.page(layer, source), (layer, source, target)

    def close(self) -> None:
        self.source_port.close()
        self.target_port.close()


def make_bench(kind: str, spin_us: int = 0) -> Bench:
    if kind == "loopback":
        fabric = LoopbackFabric(seed=7)
        return Bench(kind, fabric.open_port, fabric.run)
    return Bench(kind, lambda max_writes: open_kind(kind, max_writes, spin_us=spin_us), lambda: None)


def open_kind(kind: str, max_writes: int = 4096, hosts: Sequence[str] = (), spin_us: int = 0) -> LibfabricPort:
    """A port of a provider, over two NICs, or one whose peers copy. `hosts`: of its NICs, if not those of loopback."""
    providers = "shm" if kind == "shm" else "net,tcp"
    loopback = ("127.0.0.1", "127.0.0.2") if kind == "two-nics" else ("127.0.0.1",)
    copies = kind == "copy"
    return LibfabricPort(providers, hosts or loopback, spin_us=spin_us, copies=copies, max_writes=max_writes)


def shuffled_pages(seed: int, number: int = NUM_PAGES) -> list[tuple[int, int]]:
    """Pairs (source, target), both in an order of their own."""
    rng = random.Random(seed)
    return list(zip(rng.sample(range(NUM_PAGES), number), rng.sample(range(NUM_PAGES), number), strict=True))
