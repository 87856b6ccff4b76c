"""The real port: libfabric, through the C library in native/. The only file that touches ffi.

A handoff's bytes pass here twice: the prefiller's `write` hands a whole chunk to the progress thread of its port, and
the decoder's port counts what arrives. Everything in between happens in C; Python sees the events.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import random
import re
import select
import struct
import time
from array import array
from collections.abc import Sequence
from pathlib import Path

from pdd._fabric import ffi, lib
from pdd.base.errors import FabricBusy, FabricError, FabricUnavailable
from pdd.base.ids import Immediate
from pdd.fabric.immediate import pack
from pdd.fabric.port import (
    CountReached,
    CudaMemory,
    Event,
    Memory,
    Peer,
    PeerInfo,
    Piece,
    PortFailed,
    ProviderInfo,
    RegisteredMemory,
    StrayWrite,
    Token,
    Watch,
    Write,
    WriteDone,
)
from pdd.topology.model import Fabric, Provider

PROVIDERS = {
    Provider.TCP: "net,tcp",
    Provider.SHM: "shm",
    Provider.EFA: "efa",
    Provider.VERBS: "verbs;ofi_rxm",
}
"""libfabric's names in order of choice. 1.17 calls its own TCP endpoint `net`; newer libraries call it `tcp`. A third,
`tcp;ofi_rxm`, is left out: in 1.17 and in 2.5 it crashes now and then when an endpoint is closed under load, and no
library from 1.17 on lacks both of the others."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 (where the shm provider keeps its endpoints)
MAX_EVENTS = 256
WRITE = struct.Struct("@8Q7I4x3Q")
"""struct pdd_write."""
EVENT = struct.Struct("@IiI4x5Q")
"""struct pdd_event, without the slot."""
WRITE_DONE, COUNT_REACHED, STRAY = lib.PDD_WRITE_DONE, lib.PDD_COUNT_REACHED, lib.PDD_STRAY
MEASURED_PAGES = 512
MEASURED_PAGE_BYTES = 64 * 1024
MEASURED_PATIENCE_S = 0.15
NS = 1e-9


def sweep_dead_endpoints(directory: Path) -> list[Path]:
    """Removes the endpoints that ports of this user left when they were killed; returns what it removed."""
    removed = []
    for path in directory.glob("pdd-*:*"):
        owner = re.match(r"pdd-(\d+):", path.name)
        if owner and not Path(f"/proc/{owner[1]}").exists() and path.stat().st_uid == os.getuid():
            path.unlink(missing_ok=True)
            removed.append(path)
    return removed


def _check(result: int, doing: str) -> int:
    """Passes what is not negative; raises FabricBusy or FabricError for the rest."""
    if result >= 0:
        return result
    text = f"fabric: {doing}: {ffi.string(lib.pdd_strerror(result)).decode()}"
    raise (FabricBusy if result == -errno.EAGAIN else FabricError)(text, -result)


class LibfabricPort:
    """FabricPort over libfabric. All calls come from one thread. `open` opens one; `close` it when done.

    shm, if two ports of one process write to each other: close the writing one first. libfabric lets them share queues
    without counting who uses them."""

    @classmethod
    def open(cls, provider: Provider, hosts: Sequence[str], *, spin_us: int, copies: bool,
             cores: Sequence[int] = (), cuda: bool = False) -> LibfabricPort:  # fmt: skip
        """Opens the best provider of this kind on the address of each NIC. `copies`: peers of this machine may have
        their pages copied, where the system lets us (`info.copies`). `cores`: where the progress thread may run; none:
        anywhere. `cuda`: GPU memory is going to be registered. Raises FabricUnavailable."""
        if provider is Provider.SHM:
            sweep_dead_endpoints(SHARED_MEMORY)
        return cls(PROVIDERS[provider], hosts, spin_us=spin_us, copies=copies, cores=cores, cuda=cuda)

    def __init__(
        self,
        providers: str,
        hosts: Sequence[str] = ("127.0.0.1",),
        *,
        spin_us: int = Fabric().spin_us,
        copies: bool = False,
        cores: Sequence[int] = (),
        cuda: bool = False,
        max_writes: int = 4096,
    ) -> None:
        """`providers` are libfabric's names in order of choice, separated by commas."""
        names, addresses = ffi.new("char[]", providers.encode()), ffi.new("char[]", ",".join(hosts).encode())
        numbers = ffi.new("uint32_t[]", list(cores))
        fields = (names, addresses, numbers, len(cores), spin_us, max_writes, copies, cuda)
        options = ffi.new("struct pdd_options *", fields)
        port, message = ffi.new("pdd_port **"), ffi.new("char[]", 1024)
        if lib.pdd_open(options, port, message, 1024):
            raise FabricUnavailable(
                f"{ffi.string(message).decode(errors='replace')}. Check `fabric.provider` and the node's `host` in the "
                "topology, and that libfabric 1.17 or newer is installed (`fi_info -l` lists its providers)"
            )
        self.hosts = tuple(hosts)
        """Of each NIC."""
        self.spin_us = spin_us
        self._port = ffi.gc(port[0], lib.pdd_free)
        self._events = ffi.new("struct pdd_event[]", MAX_EVENTS)
        self._event_bytes = ffi.buffer(self._events)
        self._handle = ffi.new("uint32_t *")
        self._spec = ffi.new("struct pdd_write *")
        self._spec_bytes = ffi.buffer(self._spec)

    @property
    def info(self) -> ProviderInfo:
        info = ffi.new("struct pdd_info *")
        lib.pdd_get_info(self._port, info)
        return ProviderInfo(
            provider=ffi.string(info.provider).decode(),
            library_version=ffi.string(info.library_version).decode(),
            num_nics=info.num_nics,
            pages_per_write=info.pages_per_write,
            max_write_bytes=info.max_write_bytes,
            fences=bool(info.fences),
            copies=bool(info.copies),
        )

    def statistics(self) -> dict[str, int]:
        """Counters since `open`, by name (see struct pdd_stats)."""
        stats = ffi.new("struct pdd_stats *")
        lib.pdd_get_stats(self._port, stats)
        return {name: getattr(stats, name) for name, _ in ffi.typeof("struct pdd_stats").fields}

    def nic_statistics(self, nic: int) -> dict[str, int]:
        """Of one NIC, likewise (see struct pdd_nic_stats)."""
        stats = ffi.new("struct pdd_nic_stats *")
        _check(lib.pdd_get_nic_stats(self._port, nic, stats), f"statistics of NIC {nic}")
        return {name: getattr(stats, name) for name, _ in ffi.typeof("struct pdd_nic_stats").fields}

    def register(
        self, address: int, length_bytes: int, fd: int = -1, cuda: CudaMemory | None = None
    ) -> RegisteredMemory:
        of_device = (cuda.device, cuda.dmabuf_fd) if cuda else (-1, -1)
        region = ffi.new("struct pdd_region *", (address, length_bytes, fd, *of_device))
        out = ffi.new("struct pdd_memory *")
        place = f" of CUDA device {cuda.device}" if cuda else ""
        _check(lib.pdd_register(self._port, region, out), f"register {length_bytes} bytes{place}")
        return RegisteredMemory(Memory(out.memory), bytes(ffi.buffer(out.address, out.address_bytes)))

    def release(self, memory: Memory) -> None:
        _check(lib.pdd_release(self._port, memory), f"release memory {memory}")

    def add_peer(self, address: bytes) -> Peer:
        _check(lib.pdd_add_peer(self._port, address, len(address), self._handle), f"add peer at {address.hex()}")
        return Peer(self._handle[0])

    def drop_peer(self, peer: Peer) -> None:
        _check(lib.pdd_drop_peer(self._port, peer), f"drop peer {peer}")

    def peer_info(self, peer: Peer) -> PeerInfo:
        info = ffi.new("struct pdd_peer_info *")
        _check(lib.pdd_get_peer(self._port, peer, info), f"peer {peer}")
        return PeerInfo(copies=bool(info.copies), num_paths=info.num_paths, num_open=info.num_open)

    def watch(self, counter_address: int, wake_fd: int) -> Watch:
        _check(lib.pdd_watch(self._port, counter_address, wake_fd, self._handle), "watch a layer counter")
        return Watch(self._handle[0])

    def unwatch(self, watch: Watch) -> None:
        _check(lib.pdd_unwatch(self._port, watch), f"unwatch {watch}")

    def expect(self, immediate: Immediate, num_pieces: int) -> None:
        _check(lib.pdd_expect(self._port, immediate, num_pieces), f"expect {num_pieces} pieces for {immediate:#x}")

    def arrived(self, immediate: Immediate) -> int:
        return int(lib.pdd_arrived(self._port, immediate))

    def change_expected(self, immediate: Immediate, num_pieces: int) -> None:
        result = lib.pdd_change_expected(self._port, immediate, num_pieces)
        _check(result, f"change to {num_pieces} expected pieces for {immediate:#x}")

    def unexpect(self, immediate: Immediate) -> int:
        return int(lib.pdd_unexpect(self._port, immediate))

    def write(self, write: Write) -> None:
        if len(write.source_pages) != len(write.target_pages):
            numbers = f"{len(write.source_pages)} source pages and {len(write.target_pages)} target pages"
            raise FabricError(f"fabric: write {write.token} has {numbers}: they must be as many", errno.EINVAL)
        # No loop over pages, and no copy of those that come as planned: the library makes its own.
        try:
            source_pages, target_pages = _as_array(write.source_pages), _as_array(write.target_pages)
            pieces = array("Q", [number for piece in write.pieces for number in _piece_fields(piece)])
            self._pack_write(write, source_pages, target_pages, pieces)
        except (OverflowError, struct.error) as error:
            raise FabricError(f"fabric: write {write.token}: {error}", errno.EINVAL) from error
        _check(lib.pdd_submit(self._port, self._spec), f"write {write.token}")

    def _pack_write(self, write: Write, source_pages: array[int], target_pages: array[int], pieces: array[int]) -> None:
        """Fills in `_spec` at once: as a dictionary of fields it would take several times as long. The caller keeps the
        arrays alive."""
        WRITE.pack_into(
            self._spec_bytes,
            0,
            write.token,
            write.source_base,
            write.source_layer_bytes,
            write.source_page_bytes,
            write.target_base,
            write.target_layer_bytes,
            write.target_page_bytes,
            write.counter_base,
            write.peer,
            write.memory,
            write.watch or 0,
            write.immediate,
            write.num_layers,
            len(source_pages),
            len(write.pieces),
            source_pages.buffer_info()[0],
            target_pages.buffer_info()[0],
            pieces.buffer_info()[0],
        )

    def cancel(self, token: Token) -> None:
        lib.pdd_cancel(self._port, token)

    def fileno(self) -> int:
        return int(lib.pdd_event_fd(self._port))

    def events(self) -> list[Event]:
        found: list[Event] = []
        number = MAX_EVENTS
        while number == MAX_EVENTS:
            number = lib.pdd_drain(self._port, self._events, MAX_EVENTS)
            found += [_event(fields) for fields in EVENT.iter_unpack(self._event_bytes[: number * EVENT.size])]
        return found

    def close(self) -> None:
        lib.pdd_close(self._port)


def _as_array(pages: Sequence[int]) -> array[int]:
    """Raises OverflowError for numbers that do not fit 32 bits."""
    return pages if isinstance(pages, array) and pages.typecode == "I" else array("I", pages)


def _piece_fields(piece: Piece) -> tuple[int, int, int]:
    return piece.source_offset_bytes, piece.target_offset_bytes, piece.length_bytes


def _event(fields: tuple[int, ...]) -> Event:
    kind, error, immediate, token, num_pieces, num_bytes, first_ns, last_ns = fields
    if kind == COUNT_REACHED:
        return CountReached(Immediate(immediate), first_ns * NS, last_ns * NS)
    if kind == WRITE_DONE:
        return WriteDone(Token(token), error, num_pieces, num_bytes, first_ns * NS if first_ns else None)
    if kind == STRAY:
        return StrayWrite(Immediate(immediate), num_pieces)
    return PortFailed(error)


def measure(port: LibfabricPort) -> float | None:
    """GB/s from this port to a second one that lives only for this call: 32 MiB in pages of 64 KiB, in shuffled order,
    the second of two rounds. None when a round takes longer than 0.15 s. For a port that nothing else uses yet: it
    takes the port's events."""
    num_bytes = MEASURED_PAGES * MEASURED_PAGE_BYTES
    memory = mmap.mmap(-1, 2 * num_bytes)
    base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    target = LibfabricPort(port.info.provider, port.hosts, spin_us=port.spin_us)
    peer = None
    try:
        source_memory, target_memory = port.register(base, num_bytes), target.register(base + num_bytes, num_bytes)
        peer = port.add_peer(target_memory.address)
        target_pages = random.Random(0).sample(range(MEASURED_PAGES), MEASURED_PAGES)  # noqa: S311 (a fixed shuffle)
        write = Write(
            token=Token(0),
            peer=peer,
            memory=source_memory.memory,
            immediate=pack(0, 0),
            num_layers=1,
            source_base=base,
            source_layer_bytes=0,
            source_page_bytes=MEASURED_PAGE_BYTES,
            target_base=0,
            target_layer_bytes=0,
            target_page_bytes=MEASURED_PAGE_BYTES,
            source_pages=tuple(range(MEASURED_PAGES)),
            target_pages=tuple(target_pages),
            pieces=(Piece(0, 0, MEASURED_PAGE_BYTES),),
        )
        seconds = [_seconds_until_counted(port, target, write) for _ in range(2)][-1]  # the first connects and faults
        port.release(source_memory.memory)
    finally:
        if peer is not None:
            port.drop_peer(peer)
        port.events()
        target.close()
    return num_bytes * NS / seconds if seconds else None


def _seconds_until_counted(source: LibfabricPort, target: LibfabricPort, write: Write) -> float | None:
    target.expect(write.immediate, len(write.source_pages))
    counted = select.poll()  # select() ends where a daemon's descriptors do not: at 1024
    counted.register(target, select.POLLIN)
    start_s = time.monotonic()
    source.write(write)
    if counted.poll(MEASURED_PATIENCE_S * 1000):
        for event in target.events():
            if isinstance(event, CountReached):
                return event.last_s - start_s
    target.unexpect(write.immediate)
    return None
