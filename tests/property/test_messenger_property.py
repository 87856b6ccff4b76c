"""Two prefillers and a decoder of any shapes, over a simulated fabric that reorders, delays, loses and breaks; links
that double and break.

What must hold whatever happens: bytes that arrived are the source's, no byte is placed in a page that was given back,
and every handoff ends exactly once on each side.
"""

from __future__ import annotations

import ctypes
import errno
import itertools
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdd.base.errors import BadTicket, FabricError
from pdd.base.ids import Immediate, Incarnation, PageId, ReplicaName, RequestId
from pdd.fabric.loopback import LoopbackFabric
from pdd.fabric.loopback_port import LoopbackPort
from pdd.memory.layout import KvLayout
from pdd.memory.shape import KvShape, heads_of
from pdd.transfer.group import Arrived, Drained, MessengerGroup, PortBroken, Sent, Stopped
from pdd.transfer.messenger import Messenger
from pdd.transfer.plan import lacking_pages
from pdd.wire.messages import CancelPrefill, Message, PrefillRejected, PrefillRequest, PrefillStopped

DECODER = Incarnation("d" * 16)
REPLICA = ReplicaName("decode/0")
REQUESTS = [RequestId(f"r{number}") for number in range(4)]

TP_OF_HEADS = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (3, 1), (1, 3)]
TP_OF_LATENT = [(1, 4), (4, 1), (2, 2)]
PAGE_TOKENS = [(4, 4), (16, 32), (32, 16)]
MAX_BLOCKS, NUM_PAGES = 4, 12
"""Of a handoff; of a source's arena."""


def make_shape(tp: int, num_kv_heads: int, num_planes: int, page_tokens: int, num_pages: int) -> KvShape:
    layout = KvLayout(
        num_layers=2, num_kv_heads=len(heads_of(0, tp, num_kv_heads)), head_dim=1, page_tokens=page_tokens,
        dtype="float32", num_pages=num_pages, num_planes=num_planes,
    )  # fmt: skip
    return KvShape(tp=tp, num_kv_heads=num_kv_heads, layout=layout)


def draw_shapes(
    dice: random.Random, source_tp: int, target_tp: int, num_pages: int, *, latent: bool
) -> tuple[KvShape, KvShape]:
    num_kv_heads = 1 if latent else dice.choice([3] if 3 in (source_tp, target_tp) else [2, 4])
    num_planes = 1 if latent else 2
    source_tokens, target_tokens = dice.choice(PAGE_TOKENS)
    return (
        make_shape(source_tp, num_kv_heads, num_planes, source_tokens, num_pages),
        make_shape(target_tp, num_kv_heads, num_planes, target_tokens, num_pages + 2),
    )


class Pages:
    """The arenas of a replica set, and the pages that nobody owns; those keep a mark that must not change."""

    def __init__(self, shape: KvShape) -> None:
        layout = self.layout = shape.layout
        self.shape = shape
        self.free = [PageId(page) for page in range(layout.num_pages)]
        self.marks = np.zeros(layout.num_pages, np.uint8)
        self.arenas: list[npt.NDArray[np.uint8]] = [
            np.zeros((layout.num_layers, layout.num_pages, layout.page_bytes), np.uint8) for _ in range(shape.tp)
        ]

    def take(self, number: int) -> list[PageId]:
        taken, self.free = self.free[:number], self.free[number:]
        return taken

    def give_back(self, pages: Sequence[PageId], mark: int) -> None:
        self.marks[list(pages)] = mark
        for arena in self.arenas:
            arena[:, list(pages)] = mark
        self.free += pages

    def rows(self, rank: int, layer: int, page: PageId) -> npt.NDArray[np.uint8]:
        """A view of a page: [plane, head, token, byte]."""
        layout = self.layout
        page_bytes = self.arenas[rank][layer, page]
        return page_bytes.reshape(layout.num_planes, layout.num_kv_heads, layout.page_tokens, layout.row_bytes)

    def check(self) -> None:
        for arena in self.arenas:
            unchanged = arena[:, self.free] == self.marks[self.free][:, None]
            assert unchanged.all(), "a page changed after it was given back"


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

    def content(self, layer: int, heads: range, num_planes: int, tokens: range) -> npt.NDArray[np.uint8]:
        """[plane, head, token, byte]: the rows of some heads, each unlike any other."""
        rows = np.empty((num_planes, len(heads), len(tokens), 4), np.uint8)
        rows[..., 0] = 1 + self.number % 200
        rows[..., 1] = 1 + 2 * layer + np.arange(num_planes)[:, None, None]
        rows[..., 2] = 1 + np.array(heads)[None, :, None]
        rows[..., 3] = 1 + np.array(tokens)[None, None, :]
        return rows


class Prefiller:
    def __init__(self, fabric: LoopbackFabric, name: str, shape: KvShape, max_writes: int) -> None:
        self.incarnation = Incarnation(name * 16)
        self.pages = Pages(shape)
        self.counter = ctypes.c_uint64(0)
        self.ports = [fabric.open_port(max_writes) for _ in range(shape.tp)]
        watches = [port.watch(ctypes.addressof(self.counter), -1) for port in self.ports]
        self.group = MessengerGroup(
            shape,
            [
                Messenger(port, shape.layout, arena.ctypes.data, watch)
                for port, arena, watch in zip(self.ports, self.pages.arenas, watches, strict=True)
            ],
        )
        self.handoffs: dict[Immediate, Handoff] = {}
        """Accepted ones, ended or not."""
        self.step: list[tuple[Handoff, int]] = []
        """(handoff, end of its chunk) of what is being computed."""
        self.layers_to_go = 0
        self.link_broken = True
        self.unaware = False
        """The link is broken, and only the decoder knows."""
        self.broken = False
        """One of its ports is."""
        self.inbox: deque[Message] = deque()
        self.outbox: deque[Message] = deque()

    def open_handoffs(self) -> list[Handoff]:
        return [it for it in self.handoffs.values() if not it.source_end]

    def unfinished(self) -> list[Handoff]:
        return [it for it in self.open_handoffs() if it.next_chunk < len(it.cuts) and not it.cancelled]


class World:
    """Everything, and the dice: a seed decides what happens next, so that a failure can be run again."""

    def __init__(self, seed: int, source_tp: int, target_tp: int, *, latent: bool) -> None:
        self.random = random.Random(seed)
        self.fabric = LoopbackFabric(seed)
        self.source, self.target = draw_shapes(self.random, source_tp, target_tp, NUM_PAGES, latent=latent)
        self.pages = Pages(self.target)
        self.ports = [self.fabric.open_port() for _ in range(self.target.tp)]
        self.decoder = MessengerGroup(
            self.target,
            [
                Messenger(port, self.target.layout, arena.ctypes.data)
                for port, arena in zip(self.ports, self.pages.arenas, strict=True)
            ],
        )
        max_writes = self.random.choice([1, 2, 4096])
        self.prefillers = [Prefiller(self.fabric, name, self.source, max_writes) for name in "ef"]
        self.handoffs: dict[Immediate, Handoff] = {}
        self.owner: dict[Immediate, Prefiller] = {}
        self.held: set[LoopbackPort] = set()
        self.decoder_broken = False
        self.may_lose_pieces = self.random.random() < 0.3
        self.may_break_ports = self.random.random() < 0.2
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
            self.break_a_port: 0.1 * self.may_break_ports,
            self.break_a_port_of_the_decoder: 0.02 * self.may_break_ports,
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
        page_tokens = self.target.layout.page_tokens
        num_tokens = self.random.randint(1, MAX_BLOCKS * min(page_tokens, self.source.layout.page_tokens) + 2)
        start_token = page_tokens * self.random.randint(0, (num_tokens - 1) // page_tokens)
        lacking = lacking_pages(self.target.layout, start_token, num_tokens)
        if prefiller.link_broken or self.decoder_broken or not requests or len(lacking) > len(self.pages.free):
            return
        cuts = sorted({num_tokens, *(self.random.randint(1, num_tokens) for _ in range(self.random.randint(0, 3)))})
        request = self.random.choice(requests)
        pages = self.pages.take(len(lacking))
        seed = len(self.handoffs)
        immediates = self.decoder.arm(request, prefiller.incarnation, self.source, start_token, num_tokens)
        ticket = PrefillRequest(
            request=request, source_replica=ReplicaName("p/0"), target_replica=REPLICA, target_incarnation=DECODER,
            shape_digest=self.target.digest(), seed=seed, prompt=(0,) * (num_tokens + 1),
            start_token=start_token, target_pages=tuple(pages), immediates=immediates,
            lease_s=1.0,
        )  # fmt: skip
        num_cached = self.random.choice([0, 0, 1, len(cuts)])
        self.handoffs[immediates[0]] = Handoff(ticket, len(self.handoffs), cuts, num_cached)
        self.owner[immediates[0]] = prefiller
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
            layer = self.source.layout.num_layers - prefiller.layers_to_go
            for handoff, end in prefiller.step:
                if not handoff.source_end:
                    self.compute(prefiller, handoff, layer, end)
            prefiller.counter.value += 1
            prefiller.layers_to_go -= 1

    def move_bytes(self, _: Prefiller) -> None:
        for _step in range(self.random.randint(1, 8)):
            self.fabric.step()

    def hold_or_let_go(self, _: Prefiller) -> None:
        port = self.random.choice(self.ports)
        self.held ^= {port}
        (self.fabric.hold if port in self.held else self.fabric.let_go)(port)

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
            prefiller.group.disconnect(DECODER)
            self.poll_prefiller(prefiller)

    def restore_link(self, prefiller: Prefiller) -> None:
        if prefiller.link_broken and not prefiller.unaware:
            self.bring_up(prefiller)

    def lose_a_piece(self, _: Prefiller) -> None:
        if self.fabric.num_in_flight:
            self.fabric.drop(1)

    def break_a_port(self, prefiller: Prefiller) -> None:
        if not prefiller.broken:
            prefiller.broken = True
            self.fabric.fail(self.random.choice(prefiller.ports), errno.EIO)
            self.poll_prefiller(prefiller)

    def break_a_port_of_the_decoder(self, _: Prefiller) -> None:
        if not self.decoder_broken:
            self.decoder_broken = True
            self.fabric.fail(self.random.choice(self.ports), errno.EIO)
            self.poll_decoder()

    # What must hold.

    def nothing_contradicts(self) -> None:
        self.pages.check()
        assert self.decoder.check() == []
        for prefiller in self.prefillers:
            assert prefiller.group.check() == []
            prefiller.pages.check()

    def end(self) -> None:
        for port in self.ports:
            self.fabric.let_go(port)
        self.settle()
        for prefiller in self.prefillers:  # fences what lost a piece
            self.break_link(prefiller)
            self.notice(prefiller)
        self.settle()
        self.nothing_contradicts()
        assert all(it.target_end for it in self.handoffs.values())
        assert not any(prefiller.open_handoffs() for prefiller in self.prefillers)
        assert len(self.pages.free) == self.target.layout.num_pages
        assert all(len(prefiller.pages.free) == self.source.layout.num_pages for prefiller in self.prefillers)
        if not self.may_lose_pieces:
            assert all(
                it.target_end == "Arrived" for it in self.handoffs.values() if it.source_end == "Sent" and not it.fenced
            )
        for group in (self.decoder, *(prefiller.group for prefiller in self.prefillers)):
            group.close()
            assert group.poll() == []

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
        for grant in self.decoder.grants(prefiller.incarnation, REPLICA):
            prefiller.group.connect(DECODER, grant)

    def prefiller_hears(self, prefiller: Prefiller, message: Message) -> None:
        if isinstance(message, CancelPrefill):
            handoff = prefiller.handoffs.get(message.immediate)
            if handoff is not None:
                handoff.cancelled = True
                prefiller.group.stop(message.request, "cancelled")
            return
        assert isinstance(message, PrefillRequest)
        immediate = message.immediates[0]
        handoff = self.handoffs[immediate]
        num_pages = self.source.layout.num_pages_for(handoff.num_tokens)
        try:
            if num_pages > len(prefiller.pages.free) and immediate not in prefiller.handoffs:
                raise BadTicket("no pages")
            prefiller.group.accept(message, DECODER, self.target)
        except (BadTicket, FabricError) as error:
            if immediate not in prefiller.handoffs:  # a doubled ticket has been answered already
                rejected = PrefillRejected(
                    request=message.request, immediate=immediate, code="bad_ticket", reason=str(error)
                )
                prefiller.outbox.append(rejected)
                handoff.cancelled = True
            return
        assert immediate not in prefiller.handoffs
        prefiller.handoffs[immediate] = handoff
        handoff.source_pages = prefiller.pages.take(num_pages)
        for layer in range(self.source.layout.num_layers):  # what the prefix cache holds
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
            layout = self.source.layout
            first_page = start // layout.page_tokens
            prefiller.group.announce(
                handoff.ticket.request, start, end, last=end == handoff.num_tokens,
                pages=handoff.source_pages[first_page : layout.num_pages_for(end)],
                counter_base=None if cached else prefiller.counter.value,
            )  # fmt: skip
            handoff.next_chunk += 1
            if not cached:
                prefiller.step.append((handoff, end))
        prefiller.layers_to_go = self.source.layout.num_layers if prefiller.step else 0

    def compute(self, prefiller: Prefiller, handoff: Handoff, layer: int, end: int) -> None:
        """Fills in a layer of the positions before `end`, on every rank."""
        layout = self.source.layout
        for rank in range(self.source.tp):
            for index, page in enumerate(handoff.source_pages):
                first = index * layout.page_tokens
                tokens = range(first, min(end, first + layout.page_tokens))
                rows = handoff.content(layer, self.source.heads_of(rank), layout.num_planes, tokens)
                prefiller.pages.rows(rank, layer, page)[:, :, : len(tokens)] = rows

    def poll_prefiller(self, prefiller: Prefiller) -> None:
        for event in prefiller.group.poll():
            if isinstance(event, PortBroken):
                assert prefiller.broken
                continue
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
            if isinstance(event, PortBroken):
                assert self.decoder_broken
                continue
            assert isinstance(event, Arrived | Drained), "a stray would be a write after the end of its handoff"
            handoff = self.handoffs[event.immediate]
            assert not handoff.target_end
            handoff.target_end = type(event).__name__
            handoff.fenced = isinstance(event, Drained) and event.fenced
            if isinstance(event, Arrived):
                self.compare(handoff)
                self.decoder.forget(event.request)
            self.pages.give_back(handoff.ticket.target_pages, 0xDD)

    def compare(self, handoff: Handoff) -> None:
        """Every rank has its heads of every position that it lacked."""
        layout = self.target.layout
        for rank, layer in itertools.product(range(self.target.tp), range(layout.num_layers)):
            for index, page in enumerate(handoff.ticket.target_pages):
                first = handoff.ticket.start_token + index * layout.page_tokens
                tokens = range(first, min(handoff.num_tokens, first + layout.page_tokens))
                rows = handoff.content(layer, self.target.heads_of(rank), layout.num_planes, tokens)
                assert (self.pages.rows(rank, layer, page)[:, :, : len(tokens)] == rows).all()


@pytest.mark.parametrize(("source_tp", "target_tp"), TP_OF_HEADS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_to_heads(seed: int, source_tp: int, target_tp: int) -> None:
    world = World(seed, source_tp, target_tp, latent=False)
    world.live(num_steps=300)
    world.end()


@pytest.mark.parametrize(("source_tp", "target_tp"), TP_OF_LATENT)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_whatever_happens_to_latents(seed: int, source_tp: int, target_tp: int) -> None:
    world = World(seed, source_tp, target_tp, latent=True)
    world.live(num_steps=300)
    world.end()
