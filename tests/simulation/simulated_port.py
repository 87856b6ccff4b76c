"""A port of the simulated network that knows whose pages the bytes on their way belong to."""

from __future__ import annotations

from collections.abc import Callable

from simulated_ranks import Memory

from pdd.base.ids import Immediate, PageId, RequestId
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.loopback_port import LoopbackPort, Message
from pdd.fabric.port import CudaMemory, RegisteredMemory
from pdd.fabric.port import Memory as MemoryHandle
from pdd.memory.pool import PagePool
from pdd.wire.messages import PrefillRequest

Complain = Callable[[str], None]
NEVER_OVER_S = float("inf")


class WatchedPort(LoopbackPort):
    """Each byte is read from a page that its request owns, and placed in one that its ticket names and that nobody else
    has."""

    memory: Memory
    pool: PagePool
    complain: Complain
    tickets: dict[Immediate, PrefillRequest]
    by_key: dict[bytes, WatchedPort]
    now_s: Callable[[], float]
    late_s: float
    """How long after a registration's release the provider may place what was posted to it."""
    late_until_s: dict[bytes, float]
    """By address of the registration."""

    @classmethod
    def open(
        cls,
        fabric: LoopbackFabric,
        memory: Memory,
        pool: PagePool,
        by_key: dict[bytes, WatchedPort],
        complain: Complain,
        *,
        now_s: Callable[[], float],
        late_s: float,
    ) -> WatchedPort:
        port = cls(len(fabric._ports), fabric._random, 4096, fabric.fences)
        port.memory, port.pool, port.complain = memory, pool, complain
        port.now_s, port.late_s, port.late_until_s = now_s, late_s, {}
        port.tickets, port.by_key = {}, by_key
        fabric._ports.append(port)
        return port

    @property
    def has_news(self) -> bool:
        return bool(self._events) and not self._closed

    @property
    def is_open(self) -> bool:
        return not self._closed

    @property
    def may_move(self) -> bool:
        return bool(self.outbox or self._writes)

    def register(
        self, address: int, length_bytes: int, fd: int = -1, cuda: CudaMemory | None = None
    ) -> RegisteredMemory:
        registered = super().register(address, length_bytes, fd, cuda)
        self.by_key[registered.address] = self
        return registered

    def release(self, memory: MemoryHandle) -> None:
        self.late_until_s[self._memories[memory].own_address] = self.now_s() + self.late_s
        super().release(memory)

    def complete(self, message: Message) -> None:
        target = self.by_key.get(message.to)
        request = target.tickets[message.write.spec.immediate].request if target is not None else None
        page = PageId(self.memory.page_at(message.source_address))
        if request is not None and page not in owned_by(self.pool, request):
            self.complain(f"page {page} is sent for {request}, which does not own it")
        super().complete(message)

    def place(self, message: Message, now_s: float) -> None:
        if self.late_until_s.get(message.to, NEVER_OVER_S) <= self.now_s():
            self.end_late(message.to)
        if any(registration.own_address == message.to for registration in self._open):
            page = self.memory.page_at(self.memory.address + message.target_offset_bytes)
            self._check_place(message.write.spec.immediate, PageId(page))
        super().place(message, now_s)

    def _check_place(self, immediate: Immediate, page: PageId) -> None:
        ticket, count = self.tickets[immediate], self._count(immediate)
        if page not in ticket.target_pages:
            self.complain(f"page {page} is written for {ticket.request}, whose ticket does not name it")
        if count is None or count.reached:
            self.complain(f"page {page} is written for {ticket.request}, which expects nothing any more")
        if page not in owned_by(self.pool, ticket.request):
            self.complain(f"page {page} is written for {ticket.request}, which does not have it any more")


def owned_by(pool: PagePool, request: RequestId) -> set[PageId]:
    """Its pages, those in quarantine included."""
    owned = pool.pages_of(request) if request in pool.owners() else ()
    return {*owned, *pool._quarantined.get(request, ())}
