"""Two prefillers and a decoder over a simulated fabric that reorders, delays and loses; links that double and break.

What must hold whatever happens: bytes that arrived are the source's, no byte is placed in a page that was given back,
and every handoff ends exactly once on each side.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.base.errors import BadTicket
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.port import RegisteredMemory
from pdd.memory.layout import KvLayout
from pdd.transfer.messenger import Arrived, Drained, Messenger, Sent, Stopped
from pdd.transfer.plan import lacking_pages
from pdd.wire.messages import CancelPrefill, Message, PrefillRejected, PrefillRequest, PrefillStopped

SOURCE = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, page_tokens=4, dtype="float32", num_pages=12)
TARGET = msgspec.structs.replace(SOURCE, num_pages=14)
DECODER = Incarnation("d" * 16)
REPLICA = ReplicaName("decode/0")
REQUESTS = [RequestId(f"r{number}") for number in range(4)]


class Pages:
    """An arena and the pages of it that nobody owns; those keep a pattern that must not change."""

    def __init__(self, layout: KvLayout) -> None:
        self.layout = layout
        self.arena = ctypes.create_string_buffer(layout.arena_bytes)
        self.free = [PageId(page) for page in range(layout.num_pages)]
        self.pattern = dict.fromkeys(self.free, b"\x00" * layout.page_bytes)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.arena)

    def take(self, number: int) -> list[PageId]:
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def give_back(self, pages: Sequence[PageId], mark: int) -> None:
        for page in pages:
            self.pattern[page] = bytes([mark]) * self.layout.page_bytes
            for layer in range(self.layout.num_layers):
                self.write(layer, page, self.pattern[page])
        self.free += pages

    def read(self, layer: int, page: PageId) -> bytes:
        start = self.layout.offset_bytes(layer, page)
        return self.arena.raw[start : start + self.layout.page_bytes]

    def write(self, layer: int, page: PageId, content: bytes) -> None:
        ctypes.memmove(self.address + self.layout.offset_bytes(layer, page), content, len(content))

    def check(self) -> None:
        for page in self.free:
            for layer in range(self.layout.num_layers):
                assert self.read(layer, page) == self.pattern[page], f"page {page} changed after it was given back"


@dataclass
class Handoff:
    ticket: PrefillRequest
    number: int
    cuts: list[int]
    """Ends of the chunks."""
    num_cached_chunks: int
    source_pages: list[PageId] = field(default_factory=list)
    next_chunk: int = 0
    cancelled: bool = False
    target_end: str = ""
    source_end: str = ""
    fenced: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.ticket.prompt) - 1

    def content(self, layer: int, index: int) -> bytes:
        return bytes([1 + self.number % 200, 1 + layer, 1 + index, 7]) * (SOURCE.page_bytes // 4)


class Prefiller:
    def __init__(self, fabric: LoopbackFabric, name: str, max_writes: int) -> None:
        self.incarnation = Incarnation(name * 16)
        self.pages = Pages(SOURCE)
        self.counter = ctypes.c_uint64(0)
        self.port = fabric.open_port(max_writes)
        watch = self.port.watch(ctypes.addressof(self.counter), -1)
        self.messenger = Messenger(self.port, SOURCE, self.pages.address, watch)
        self.handoffs: dict[Immediate, Handoff] = {}
        """Accepted ones, ended or not."""
        self.step: list[tuple[Handoff, int]] = []
        """(handoff, end of its chunk) of what is being computed."""
        self.layers_to_go = 0
        self.link_broken = True
        self.unaware = False
        """The link is broken, and only the decoder knows."""
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()
        self.grant: RegisteredMemory | None = None

    def open_handoffs(self) -> list[Handoff]:
        return [it for it in self.handoffs.values() if not it.source_end]

    def unfinished(self) -> list[Handoff]:
        return [it for it in self.open_handoffs() if it.next_chunk < len(it.cuts) and not it.cancelled]


class World:
    """Everything, and the dice: a seed decides what happens next, so that a failure can be run again."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.fabric = LoopbackFabric(seed)
        self.pages = Pages(TARGET)
        self.port = self.fabric.open_port()
        self.decoder = Messenger(self.port, TARGET, self.pages.address)
        max_writes = self.random.choice([1, 2, 4096])
        self.prefillers = [Prefiller(self.fabric, name, max_writes) for name in "ef"]
        self.handoffs: dict[Immediate, Handoff] = {}
        self.owner: dict[Immediate, Prefiller] = {}
        self.held = False
        self.may_lose_pieces = self.random.random() < 0.3
        for prefiller in self.prefillers:
            self.bring_up(prefiller)

    def live(self, num_steps: int) -> None:
        weights: dict[Callable[[Prefiller], None], float] = {
            self.ask: 3,
            self.deliver_to_prefiller: 4,
            self.deliver_to_decoder: 4,
            self.begin_step: 3,
            self.compute_layer: 5,
            self.move_bytes: 5,
            self.poll_prefiller: 3,
            self.poll_decoder_too: 3,
            self.cancel: 0.5,
            self.hold_or_let_go: 0.3,
            self.break_link: 0.2,
            self.notice: 0.6,
            self.restore_link: 1,
            self.lose_a_piece: 0.1 * self.may_lose_pieces,
        }
        actions = self.random.choices(list(weights), list(weights.values()), k=num_steps)
        for action in actions:
            action(self.random.choice(self.prefillers))
            self.nothing_contradicts()

    # What may happen.

    def ask(self, prefiller: Prefiller) -> None:
        """The decoder sends a ticket."""
        taken = {it.ticket.request for it in self.handoffs.values() if not it.target_end}
        requests = [request for request in REQUESTS if request not in taken]
        num_tokens = self.random.randint(1, 18)
        start_page = self.random.randint(0, (num_tokens - 1) // 4)
        lacking = lacking_pages(TARGET, 4 * start_page, num_tokens)
        if prefiller.link_broken or not requests or len(lacking) > len(self.pages.free):
            return
        cuts = sorted({num_tokens, *(self.random.randint(1, num_tokens) for _ in range(self.random.randint(0, 3)))})
        request = self.random.choice(requests)
        pages = self.pages.take(len(lacking))
        immediate = self.decoder.arm(request, prefiller.incarnation, len(pages))
        ticket = PrefillRequest(
            request=request, source_replica=ReplicaName("p/0"), target_replica=REPLICA, target_incarnation=DECODER,
            layout_digest=TARGET.digest(), prompt=(0,) * (num_tokens + 1), start_token=4 * start_page,
            target_pages=tuple(pages), immediate=immediate, lease_s=1.0,
        )  # fmt: skip
        num_cached = self.random.choice([0, 0, 1, len(cuts)])
        self.handoffs[immediate] = Handoff(ticket, len(self.handoffs), cuts, num_cached)
        self.owner[immediate] = prefiller
        prefiller.inbox.append(ticket)

    def deliver_to_prefiller(self, prefiller: Prefiller) -> None:
        if prefiller.inbox:
            message = prefiller.inbox.popleft()
            for _ in range(self.random.choice([1, 1, 1, 2])):
                self.prefiller_hears(prefiller, message)

    def deliver_to_decoder(self, prefiller: Prefiller) -> None:
        if prefiller.outbox:
            message = prefiller.outbox.popleft()
            for _ in range(self.random.choice([1, 1, 1, 2])):
                self.decoder_hears(message)

    def begin_step(self, prefiller: Prefiller) -> None:
        ready = prefiller.unfinished()
        if not prefiller.layers_to_go and ready:
            self.announce(prefiller, ready[: self.random.randint(1, len(ready))])

    def compute_layer(self, prefiller: Prefiller) -> None:
        if prefiller.layers_to_go:
            layer = SOURCE.num_layers - prefiller.layers_to_go
            for handoff, end in prefiller.step:
                if not handoff.source_end:
                    self.compute(prefiller, handoff, layer, end)
            prefiller.counter.value += 1
            prefiller.layers_to_go -= 1

    def move_bytes(self, _: Prefiller) -> None:
        for _step in range(self.random.randint(1, 8)):
            self.fabric.step()

    def hold_or_let_go(self, _: Prefiller) -> None:
        self.held = not self.held
        (self.fabric.hold if self.held else self.fabric.let_go)(self.port)

    def poll_decoder_too(self, _: Prefiller) -> None:
        self.poll_decoder()

    def cancel(self, prefiller: Prefiller) -> None:
        mine = [immediate for immediate, owner in self.owner.items() if owner is prefiller]
        running = [immediate for immediate in mine if not self.handoffs[immediate].target_end]
        if running and not prefiller.link_broken:
            immediate = self.random.choice(running)
            request = self.handoffs[immediate].ticket.request
            prefiller.inbox.append(CancelPrefill(request=request, immediate=immediate))

    def break_link(self, prefiller: Prefiller) -> None:
        """The decoder finds the link lost, and fences; the prefiller goes on until it notices."""
        if not prefiller.link_broken:
            prefiller.link_broken, prefiller.unaware = True, True
            prefiller.inbox.clear()
            prefiller.outbox.clear()
            self.decoder.revoke(prefiller.incarnation)
            self.poll_decoder()

    def notice(self, prefiller: Prefiller) -> None:
        if prefiller.unaware:
            prefiller.unaware = False
            prefiller.messenger.disconnect(DECODER)
            self.poll_prefiller(prefiller)

    def restore_link(self, prefiller: Prefiller) -> None:
        if prefiller.link_broken and not prefiller.unaware:
            self.bring_up(prefiller)

    def lose_a_piece(self, _: Prefiller) -> None:
        if self.fabric.num_in_flight:
            self.fabric.drop(1)

    # What must hold.

    def nothing_contradicts(self) -> None:
        self.pages.check()
        assert self.decoder.check() == []
        for prefiller in self.prefillers:
            assert prefiller.messenger.check() == []
            prefiller.pages.check()

    def end(self) -> None:
        self.fabric.let_go(self.port)
        self.settle()
        for prefiller in self.prefillers:  # fences what lost a piece
            self.break_link(prefiller)
            self.notice(prefiller)
        self.settle()
        self.nothing_contradicts()
        assert all(it.target_end for it in self.handoffs.values())
        assert not any(prefiller.open_handoffs() for prefiller in self.prefillers)
        assert len(self.pages.free) == TARGET.num_pages
        assert all(len(prefiller.pages.free) == SOURCE.num_pages for prefiller in self.prefillers)
        if not self.may_lose_pieces:
            assert all(
                it.target_end == "Arrived" for it in self.handoffs.values() if it.source_end == "Sent" and not it.fenced
            )
        for messenger in (self.decoder, *(prefiller.messenger for prefiller in self.prefillers)):
            messenger.close()
            assert messenger.poll() == []

    # How it happens.

    def settle(self) -> None:
        """Everything that is under way goes on for long enough."""
        for _ in range(60):
            for prefiller in self.prefillers:
                self.deliver_to_prefiller(prefiller)
                self.deliver_to_decoder(prefiller)
                self.begin_step(prefiller)
                self.compute_layer(prefiller)
                self.poll_prefiller(prefiller)
            self.fabric.run()
            self.poll_decoder()

    def bring_up(self, prefiller: Prefiller) -> None:
        prefiller.link_broken = False
        prefiller.grant = self.decoder.grant(prefiller.incarnation)
        prefiller.messenger.connect(DECODER, REPLICA, prefiller.grant.address)

    def prefiller_hears(self, prefiller: Prefiller, message: Message) -> None:
        if isinstance(message, CancelPrefill):
            handoff = prefiller.handoffs.get(message.immediate)
            if handoff is not None:
                handoff.cancelled = True
                prefiller.messenger.stop(message.request, "cancelled")
            return
        assert isinstance(message, PrefillRequest)
        assert prefiller.grant is not None
        handoff = self.handoffs[message.immediate]
        num_pages = SOURCE.num_pages_for(handoff.num_tokens)
        try:
            if num_pages > len(prefiller.pages.free) and message.immediate not in prefiller.handoffs:
                raise BadTicket("no pages")
            prefiller.messenger.accept(message, DECODER, prefiller.grant.key, prefiller.grant.base, TARGET)
        except BadTicket as error:
            if message.immediate not in prefiller.handoffs:  # a doubled ticket has been answered already
                rejected = PrefillRejected(
                    request=message.request, immediate=message.immediate, code="bad_ticket", reason=str(error)
                )
                prefiller.outbox.append(rejected)
                handoff.cancelled = True
            return
        assert message.immediate not in prefiller.handoffs
        prefiller.handoffs[message.immediate] = handoff
        handoff.source_pages = prefiller.pages.take(num_pages)
        for layer in range(SOURCE.num_layers):  # what the prefix cache holds
            for end in handoff.cuts[: handoff.num_cached_chunks]:
                self.compute(prefiller, handoff, layer, end)

    def decoder_hears(self, message: Message) -> None:
        if isinstance(message, PrefillRejected):
            self.decoder.rejected(message.request, message.immediate)
        else:
            assert isinstance(message, PrefillStopped)
            self.decoder.stopped(message.request, message.immediate, message.num_pieces)

    def announce(self, prefiller: Prefiller, handoffs: list[Handoff]) -> None:
        prefiller.step = []
        for handoff in handoffs:
            start, end = list(itertools.pairwise((0, *handoff.cuts)))[handoff.next_chunk]
            cached = handoff.next_chunk < handoff.num_cached_chunks
            first_page = start // SOURCE.page_tokens
            prefiller.messenger.announce(
                handoff.ticket.request, start, end, last=end == handoff.num_tokens,
                pages=handoff.source_pages[first_page : SOURCE.num_pages_for(end)],
                counter_base=None if cached else prefiller.counter.value,
            )  # fmt: skip
            handoff.next_chunk += 1
            if not cached:
                prefiller.step.append((handoff, end))
        prefiller.layers_to_go = SOURCE.num_layers if prefiller.step else 0

    def compute(self, prefiller: Prefiller, handoff: Handoff, layer: int, end: int) -> None:
        """Fills in a layer of the pages that end with position `end - 1` at the latest."""
        full = SOURCE.num_pages_for(end) if end == handoff.num_tokens else end // SOURCE.page_tokens
        for index in range(full):
            prefiller.pages.write(layer, handoff.source_pages[index], handoff.content(layer, index))

    def poll_prefiller(self, prefiller: Prefiller) -> None:
        for event in prefiller.messenger.poll():
            assert isinstance(event, Sent | Stopped)
            handoff = prefiller.handoffs[event.immediate]
            assert not handoff.source_end
            assert handoff.ticket.request == event.request
            handoff.source_end = type(event).__name__
            prefiller.pages.give_back(handoff.source_pages, 0xEE)
            if isinstance(event, Stopped) and not prefiller.link_broken:
                prefiller.outbox.append(
                    PrefillStopped(
                        request=event.request,
                        immediate=event.immediate,
                        num_pieces=event.num_pieces,
                        reason=event.reason,
                    )
                )

    def poll_decoder(self) -> None:
        for event in self.decoder.poll():
            assert isinstance(event, Arrived | Drained), "a stray would be a write after the end of its handoff"
            handoff = self.handoffs[event.immediate]
            assert not handoff.target_end
            handoff.target_end = type(event).__name__
            handoff.fenced = isinstance(event, Drained) and event.fenced
            if isinstance(event, Arrived):
                first = handoff.ticket.start_token // TARGET.page_tokens
                for layer in range(TARGET.num_layers):
                    for index, page in enumerate(handoff.ticket.target_pages):
                        assert self.pages.read(layer, page) == handoff.content(layer, first + index)
                self.decoder.forget(event.request)
            self.pages.give_back(handoff.ticket.target_pages, 0xDD)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32))
def test_whatever_happens(seed: int) -> None:
    world = World(seed)
    world.live(num_steps=300)
    world.end()
