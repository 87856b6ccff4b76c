"""One end of the simulated network of loopback.py: the same contract as the real port, but nothing moves by itself.

write --> outbox, when the counter allows --> [ source read, completed ] --> WriteDone here
                                          \\-> [ placed and counted ]     --> CountReached at the target
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product

from pdd.base.errors import FabricBusy, FabricError
from pdd.base.ids import Immediate
from pdd.fabric.immediate import slot_of
from pdd.fabric.port import (
    CountReached,
    CudaMemory,
    Event,
    Memory,
    Peer,
    PeerInfo,
    PortFailed,
    ProviderInfo,
    RegisteredMemory,
    StrayWrite,
    Token,
    Watch,
    Write,
    WriteDone,
)

PREFIX = b"loopback:"
UNBOUNDED_BYTES = 1 << 62
MAX_IN_FLIGHT = 128
"""Pieces for one peer that have been posted and not yet completed locally."""


@dataclass(eq=False)
class ActiveWrite:
    """A write that has not ended."""

    spec: Write
    order: Iterator[tuple[int, int, int]]
    """Of what is still to be posted: layer, index of the page pair, index of the piece."""
    next: tuple[int, int, int] | None
    """The head of `order`; None: all are posted."""
    in_flight: int = 0
    num_pieces: int = 0
    num_bytes: int = 0
    error: int = 0

    @property
    def posting(self) -> bool:
        return self.next is not None and not self.error


@dataclass(eq=False)
class Message:
    """One posted piece on its way."""

    write: ActiveWrite
    to: bytes
    source_address: int
    target_offset_bytes: int
    length_bytes: int
    content: bytes | None = None
    """Bytes of the source as they were at local completion; None before."""


@dataclass
class Count:
    immediate: Immediate
    goal: int
    arrived: int = 0
    reached: bool = False
    first_s: float = 0.0
    last_s: float = 0.0


@dataclass(frozen=True)
class Registration:
    address: int
    length_bytes: int
    own_address: bytes

    def covers(self, address: int, length_bytes: int) -> bool:
        return self.address <= address and address + length_bytes <= self.address + self.length_bytes


@dataclass(eq=False)
class LoopbackPort:
    """Made by LoopbackFabric.open_port. Registrations are memory of this process."""

    name: int
    random: random.Random
    """Source of keys; the network's, so that a run can be repeated."""
    max_writes: int
    fences: bool = True
    """False: what was posted to a registration may be placed after its `release`, until `end_late`."""
    outbox: list[Message] = field(default_factory=list)
    """What this port has posted and the network has neither placed nor lost."""
    _writes: dict[Token, ActiveWrite] = field(default_factory=dict)
    _unread: int = 0
    _counts: dict[int, Count] = field(default_factory=dict)
    _memories: dict[Memory, Registration] = field(default_factory=dict)
    _late: dict[bytes, Registration] = field(default_factory=dict)
    """By key: released ones that still let writes in."""
    _peers: dict[Peer, bytes] = field(default_factory=dict)
    _watches: dict[Watch, int] = field(default_factory=dict)
    _handles: Iterator[int] = field(default_factory=lambda: iter(range(1, 1 << 32)))
    _events: list[Event] = field(default_factory=list)
    _fd: int = field(default_factory=lambda: os.eventfd(0, os.EFD_NONBLOCK))
    _closed: bool = False
    _failed: int = 0

    # The contract of FabricPort, in its order.

    @property
    def info(self) -> ProviderInfo:
        return ProviderInfo(
            provider="loopback",
            library_version="-",
            num_nics=1,
            pages_per_write=1,
            max_write_bytes=UNBOUNDED_BYTES,
            fences=self.fences,
            copies=False,
        )

    def register(
        self, address: int, length_bytes: int, fd: int = -1, cuda: CudaMemory | None = None
    ) -> RegisteredMemory:
        self._demand(cuda is None, errno.EOPNOTSUPP, "register a GPU's memory")
        self._demand(address > 0 and length_bytes > 0, errno.EINVAL, f"register {length_bytes} bytes at {address}")
        memory = Memory(next(self._handles))
        own_address = PREFIX + b"%d:%d:%x:%d" % (self.name, memory, self.random.getrandbits(64), length_bytes)
        self._memories[memory] = Registration(address, length_bytes, own_address)
        return RegisteredMemory(memory, own_address)

    def release(self, memory: Memory) -> None:
        self._demand(memory in self._memories, errno.ENOENT, f"release memory {memory}")
        self._cancel_all(write for write in self._writes.values() if write.spec.memory == memory)
        released = self._memories.pop(memory)
        if not self.fences:
            self._late[released.own_address] = released

    def add_peer(self, address: bytes) -> Peer:
        whole = address.startswith(PREFIX) and address.rsplit(b":", 1)[1].isdigit()
        self._demand(whole, errno.EINVAL, f"add peer at {address.hex()}")
        peer = Peer(next(self._handles))
        self._peers[peer] = address
        return peer

    def drop_peer(self, peer: Peer) -> None:
        """What has completed locally may still arrive, the rest does not."""
        self._demand(peer in self._peers, errno.ENOENT, f"drop peer {peer}")
        del self._peers[peer]
        self._abandon_all([write for write in self._writes.values() if write.spec.peer == peer], errno.ECANCELED)

    def peer_info(self, peer: Peer) -> PeerInfo:
        self._demand(peer in self._peers, errno.ENOENT, f"peer {peer}")
        return PeerInfo(copies=False, num_paths=1, num_open=1)

    def watch(self, counter_address: int, wake_fd: int) -> Watch:
        self._demand(counter_address > 0, errno.EINVAL, f"watch a layer counter at {counter_address}")
        watch = Watch(next(self._handles))
        self._watches[watch] = counter_address
        return watch

    def unwatch(self, watch: Watch) -> None:
        self._demand(watch in self._watches, errno.ENOENT, f"unwatch {watch}")
        self._cancel_all(write for write in self._writes.values() if write.spec.watch == watch)
        del self._watches[watch]

    def expect(self, immediate: Immediate, num_pieces: int) -> None:
        armed = self._counts.get(slot_of(immediate))
        self._demand(armed is None or armed.reached, errno.EEXIST, f"expect {num_pieces} pieces for {immediate:#x}")
        self._counts[slot_of(immediate)] = count = Count(immediate, num_pieces)
        self._check_reached(count)

    def arrived(self, immediate: Immediate) -> int:
        count = self._count(immediate)
        return count.arrived if count else 0

    def change_expected(self, immediate: Immediate, num_pieces: int) -> None:
        count = self._count(immediate)
        if count is None:
            raise FabricError(f"fabric: change to {num_pieces} expected pieces for {immediate:#x}", errno.ENOENT)
        count.goal = num_pieces
        self._check_reached(count)

    def unexpect(self, immediate: Immediate) -> int:
        count = self._count(immediate)
        if count is None:
            return 0
        del self._counts[slot_of(immediate)]
        return count.arrived

    def write(self, write: Write) -> None:
        self._check_write(write)
        if len(self._writes) + self._unread >= self.max_writes:
            raise FabricBusy(f"fabric: write {write.token}: no completion slot is free", errno.EAGAIN)
        order = iter(product(range(write.num_layers), range(len(write.source_pages)), range(len(write.pieces))))
        self._writes[write.token] = active = ActiveWrite(write, order, next(order), error=self._failed)
        self._finish_if_done(active)

    def cancel(self, token: Token) -> None:
        if token in self._writes:
            self._cancel_all([self._writes[token]])

    def fileno(self) -> int:
        return self._fd

    def events(self) -> list[Event]:
        if self._events and not self._closed:
            os.eventfd_read(self._fd)
        taken, self._events, self._unread = self._events, [], 0
        return taken

    def close(self) -> None:
        if self._closed:
            return
        self._abandon_all(list(self._writes.values()), errno.ECANCELED)
        self._memories.clear()
        self._late.clear()
        self._peers.clear()
        self._closed = True
        os.close(self._fd)

    # For the network.

    def listens_at(self, address: bytes) -> bool:
        if self._closed:
            return False
        return any(each.own_address == address for each in self._open)

    @property
    def _open(self) -> list[Registration]:
        return [*self._memories.values(), *self._late.values()]

    def end_late(self, address: bytes) -> None:
        """The provider's bound for late writes has passed since that registration was released."""
        self._late.pop(address, None)

    def post(self) -> None:
        """Puts what the counters allow into the outbox."""
        in_flight = Counter[Peer]()
        for write in self._writes.values():
            in_flight[write.spec.peer] += write.in_flight
        for write in self._writes.values():
            while write.posting and self._may_post(write) and in_flight[write.spec.peer] < MAX_IN_FLIGHT:
                self.outbox.append(self._next_message(write))
                in_flight[write.spec.peer] += 1

    def complete(self, message: Message) -> None:
        """Local completion: the source is read now and may change afterwards."""
        message.content = ctypes.string_at(message.source_address, message.length_bytes)
        message.write.in_flight -= 1
        self._finish_if_done(message.write)

    def place(self, message: Message, now_s: float) -> None:
        """Arrival: nothing happens, as on a real fabric, when the key is closed or does not cover the bytes."""
        spec = message.write.spec
        memory = next((each for each in self._open if each.own_address == message.to), None)
        if memory is None or message.content is None:
            return
        address = memory.address + message.target_offset_bytes
        if not memory.covers(address, message.length_bytes):
            return
        ctypes.memmove(address, message.content, message.length_bytes)
        count = self._count(spec.immediate)
        if count is None or count.reached:
            self._tell(StrayWrite(spec.immediate, 1))
            return
        count.first_s = count.first_s if count.arrived else now_s
        count.last_s = now_s
        count.arrived += 1
        self._check_reached(count)

    def fail_writes(self, error: int) -> None:
        """Ends those of which something was posted; what has not completed locally will not arrive."""
        self._abandon_all([write for write in self._writes.values() if write.in_flight], error)

    def fail(self, error: int) -> None:
        """The endpoint breaks for good."""
        self._failed = error
        self._abandon_all(list(self._writes.values()), error)
        self._tell(PortFailed(error))

    # Inside.

    def _demand(self, holds: bool, error: int, doing: str) -> None:
        if self._closed:
            raise FabricError(f"fabric: {doing}: the port is closed", errno.ESHUTDOWN)
        if not holds:
            raise FabricError(f"fabric: {doing}: {os.strerror(error)}", error)

    def _check_write(self, write: Write) -> None:
        known = write.peer in self._peers and write.memory in self._memories
        known = known and (write.watch is None or write.watch in self._watches)
        self._demand(known, errno.ENOENT, f"write {write.token}: peer, memory or watch")
        whole = (
            write.num_layers > 0 and len(write.source_pages) == len(write.target_pages) > 0 and len(write.pieces) > 0
        )
        self._demand(whole and write.token not in self._writes, errno.EINVAL, f"write {write.token}")
        last = write.source_base + (write.num_layers - 1) * write.source_layer_bytes
        last += max(write.source_pages) * write.source_page_bytes
        end = max(last + piece.source_offset_bytes + piece.length_bytes for piece in write.pieces)
        source = self._memories[write.memory]
        self._demand(source.covers(write.source_base, end - write.source_base), errno.ERANGE, f"write {write.token}")
        last = write.target_base + (write.num_layers - 1) * write.target_layer_bytes
        last += max(write.target_pages) * write.target_page_bytes
        end = max(last + piece.target_offset_bytes + piece.length_bytes for piece in write.pieces)
        length_bytes = int(self._peers[write.peer].rsplit(b":", 1)[1])
        self._demand(end <= length_bytes, errno.ERANGE, f"write {write.token}")

    def _may_post(self, write: ActiveWrite) -> bool:
        watch = write.spec.watch
        if write.next is None or watch is None:
            return write.next is not None
        counter = ctypes.c_uint64.from_address(self._watches[watch]).value
        return counter >= write.spec.counter_base + write.next[0] + 1

    def _next_message(self, write: ActiveWrite) -> Message:
        assert write.next is not None
        spec, (layer, pair, index) = write.spec, write.next
        piece = spec.pieces[index]
        source = spec.source_base + layer * spec.source_layer_bytes + spec.source_pages[pair] * spec.source_page_bytes
        target = spec.target_base + layer * spec.target_layer_bytes + spec.target_pages[pair] * spec.target_page_bytes
        write.next = next(write.order, None)
        write.in_flight += 1
        write.num_pieces += 1
        write.num_bytes += piece.length_bytes
        return Message(
            write,
            self._peers[spec.peer],
            source + piece.source_offset_bytes,
            target + piece.target_offset_bytes,
            piece.length_bytes,
        )

    def _cancel_all(self, writes: Iterator[ActiveWrite] | list[ActiveWrite]) -> None:
        for write in list(writes):
            if write.posting:
                write.error = errno.ECANCELED
                self._finish_if_done(write)

    def _abandon_all(self, writes: list[ActiveWrite], error: int) -> None:
        self.outbox = [each for each in self.outbox if each.content is not None or each.write not in writes]
        for write in writes:
            write.error, write.in_flight = write.error or error, 0
            self._finish_if_done(write)

    def _finish_if_done(self, write: ActiveWrite) -> None:
        if not write.posting and not write.in_flight and write.spec.token in self._writes:
            del self._writes[write.spec.token]
            self._unread += 1
            self._tell(WriteDone(write.spec.token, write.error, write.num_pieces, write.num_bytes))

    def _count(self, immediate: Immediate) -> Count | None:
        count = self._counts.get(slot_of(immediate))
        return count if count and count.immediate == immediate else None

    def _check_reached(self, count: Count) -> None:
        if not count.reached and count.arrived >= count.goal:
            count.reached = True
            self._tell(CountReached(count.immediate, count.first_s, count.last_s))

    def _tell(self, event: Event) -> None:
        if not self._events and not self._closed:
            os.eventfd_write(self._fd, 1)
        last = self._events[-1] if self._events else None
        if isinstance(event, StrayWrite) and isinstance(last, StrayWrite) and last.immediate == event.immediate:
            self._events[-1] = StrayWrite(event.immediate, last.num_pieces + event.num_pieces)
        else:
            self._events.append(event)
