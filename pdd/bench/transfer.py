"""`pdd bench transfer`: what a handoff between two shapes costs, without a model.

Both replica sets live in this process, each rank with an arena and a port (or several: `--nics`) of its own; planner,
messengers and fabric are those of the daemons. A round is one handoff: it begins when the chunk is announced (all of
its layers are in place) and ends when the last target rank has counted its last piece. Three handoffs of the same bytes
take turns:

    asked              the shapes of the command line
    equal              the target's shape on both sides: whole pages, the fewest pieces that there can be
    equal, as small    equal shapes again, with pages as small as the pieces of the first

If the second is faster than the first and the third is not, then the extra pieces explain what the mismatch costs.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import select
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from pdd.base.errors import FabricError, InvariantBroken, TopologyInvalid
from pdd.base.ids import Incarnation, PageId, ReplicaName, RequestId
from pdd.bench.machine import Machine, describe, this_machine
from pdd.bench.peers.pair import Arena
from pdd.bench.swept import swept
from pdd.fabric.libfabric import PROVIDERS, LibfabricPort
from pdd.fabric.port import ProviderInfo
from pdd.memory.layout import DTYPE_BYTES, KvLayout
from pdd.memory.shape import KvShape, heads_of
from pdd.topology.model import Provider
from pdd.transfer.group import Arrived, MessengerGroup, Sent, TransferEvent
from pdd.transfer.messenger import Messenger
from pdd.transfer.plan import expected_bytes, expected_pieces, incompatibilities, lacking_blocks
from pdd.wire.messages import PrefillRequest

PATIENCE_S = 30.0
HEAD_DIM, LATENT_DIM = 128, 576
SOURCE, TARGET = Incarnation("5" * 16), Incarnation("7" * 16)
REPLICA = ReplicaName("bench/0")
Bytes = npt.NDArray[np.uint8]
OpenPort = Callable[[str, Sequence[str]], LibfabricPort]


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """Rounds of one pair of shapes."""

    name: str
    source: str
    target: str
    num_bytes: int
    num_pieces: int
    num_messages: int
    """What the fabric was asked to write: it takes several pieces at once."""
    seconds: list[float]
    """One for each round, in order."""

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def gigabytes_per_s(self, seconds: float) -> float:
        return self.num_bytes / seconds / 1e9


class Report(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    provider: ProviderInfo
    num_layers: int
    num_tokens: int
    num_nics: int
    """Of each rank: addresses of loopback."""
    results: list[Comparison]


class Side:
    """A replica set: arenas, a port over `num_nics` addresses for each, and their messengers."""

    def __init__(self, provider: str, shape: KvShape, num_nics: int = 1, open_port: OpenPort = LibfabricPort) -> None:
        self.shape = shape
        self.arenas = [Arena(shape.layout.arena_bytes) for _ in range(shape.tp)]
        hosts = [f"127.0.0.{nic + 1}" for nic in range(num_nics)]
        self.ports = [open_port(provider, hosts) for _ in range(shape.tp)]
        messengers = [Messenger(port, shape.layout, arena.address)
                      for port, arena in zip(self.ports, self.arenas, strict=True)]  # fmt: skip
        self.group = MessengerGroup(shape, messengers)

    def cache(self, rank: int) -> Bytes:
        """A view of a rank's arena: [layer, page, plane, head, token, byte]."""
        layout = self.shape.layout
        flat = np.ctypeslib.as_array((ctypes.c_uint8 * layout.arena_bytes).from_address(self.arenas[rank].address))
        return flat.reshape(
            layout.num_layers,
            layout.num_pages,
            layout.num_planes,
            layout.num_kv_heads,
            layout.page_tokens,
            layout.row_bytes,
        )

    def num_messages(self) -> int:
        return sum(port.statistics()["num_messages"] for port in self.ports)


class Pair:
    """A source, a target, and handoffs of `num_tokens` positions from one to the other."""

    def __init__(
        self,
        name: str,
        provider: str,
        source: KvShape,
        target: KvShape,
        num_tokens: int,
        *,
        nics: int,
        open_port: OpenPort = LibfabricPort,
    ) -> None:
        self.name = name
        self.announce_s: list[float] = []
        """Of each round: what the source's call took."""
        self.source, self.target = Side(provider, source, nics, open_port), Side(provider, target, nics)
        self.num_tokens = num_tokens
        rng = np.random.default_rng(0)
        self.source_pages = rng.permutation(source.layout.num_pages).tolist()
        self.target_pages = rng.permutation(target.layout.num_pages).tolist()
        for grant in self.target.group.grants(SOURCE, REPLICA):
            self.source.group.connect(TARGET, grant)
        self._num_rounds = 0

    def seconds(self) -> float:
        """One handoff. Raises FabricError when it does not arrive whole."""
        shape = self.target.shape
        request = RequestId(f"round-{self._num_rounds}")
        immediates = self.target.group.arm(request, SOURCE, self.source.shape, 0, self.num_tokens)
        ticket = PrefillRequest(
            request=request,
            source_replica=ReplicaName("bench/1"),
            target_replica=REPLICA,
            target_incarnation=TARGET,
            shape_digest=shape.digest(),
            seed=self._num_rounds,
            prompt=(0,) * (self.num_tokens + 1),
            start_token=0,
            target_pages=tuple(map(PageId, self.target_pages)),
            immediates=immediates,
            lease_s=PATIENCE_S,
        )
        self._num_rounds += 1
        self.source.group.accept(ticket, TARGET, shape)
        pages = tuple(map(PageId, self.source_pages))
        start_s = time.monotonic()
        self.source.group.announce(request, 0, self.num_tokens, last=True, pages=pages, counter_base=None)
        self.announce_s.append(time.monotonic() - start_s)
        arrived = self._finish()
        self.target.group.forget(request)
        return arrived.last_s - start_s

    def _finish(self) -> Arrived:
        groups = (self.source.group, self.target.group)
        events: list[TransferEvent] = []
        ready = select.poll()
        for fileno in (fileno for group in groups for fileno in group.filenos()):
            ready.register(fileno, select.POLLIN)
        while len(events) < len(groups):
            events += [event for group in groups for event in group.poll()]
            if len(events) < len(groups) and not ready.poll(PATIENCE_S * 1000):
                break
        arrived = [event for event in events if isinstance(event, Arrived)]
        if len(arrived) != 1 or not any(isinstance(event, Sent) for event in events):
            raise FabricError(f"a handoff ended in {events or 'nothing'} after {PATIENCE_S:.0f} s", 0)
        return arrived[0]

    def fill(self) -> Bytes:
        """Gives the source a cache and returns it whole: [layer, plane, head, token, byte]."""
        shape, layout = self.source.shape, self.source.shape.layout
        size = (layout.num_layers, layout.num_planes, shape.num_kv_heads, self.num_tokens, layout.row_bytes)
        model = np.frombuffer(np.random.default_rng(1).bytes(int(np.prod(size))), np.uint8).reshape(size)
        for rank in range(shape.tp):
            held = model[:, :, shape.heads_of(rank).start : shape.heads_of(rank).stop]
            by_page = held.reshape(*held.shape[:3], layout.num_pages, layout.page_tokens, layout.row_bytes)
            self.source.cache(rank)[:, self.source_pages] = np.moveaxis(by_page, 3, 1)
        return model

    def check(self, model: Bytes) -> None:
        """Raises InvariantBroken unless every target rank has its heads of it."""
        shape = self.target.shape
        for rank in range(shape.tp):
            heads = np.moveaxis(self.target.cache(rank)[:, self.target_pages], 1, 3)
            want = model[:, :, shape.heads_of(rank).start : shape.heads_of(rank).stop]
            if not np.array_equal(heads.reshape(want.shape), want):
                raise InvariantBroken(f"{self.name}: rank {rank} of the target has other bytes than the source")

    def close(self) -> None:
        self.source.group.close()
        self.target.group.close()


# Shapes.


def make_shape(tp: int, num_kv_heads: int, num_pages: int, **layout: Any) -> KvShape:
    """Raises TopologyInvalid where tp and the heads do not divide."""
    try:
        num_held = len(heads_of(0, tp, num_kv_heads))
    except ValueError as error:
        raise TopologyInvalid(str(error)) from error
    return KvShape(
        tp=tp, num_kv_heads=num_kv_heads, layout=KvLayout(num_kv_heads=num_held, num_pages=num_pages, **layout)
    )


def asked_shapes(arguments: argparse.Namespace) -> tuple[KvShape, KvShape]:
    """Raises TopologyInvalid where one cannot be written into the other."""
    sizes = arguments.page_tokens
    common = {
        "num_layers": arguments.layers,
        "head_dim": arguments.head_dim or (LATENT_DIM if arguments.mla else HEAD_DIM),
        "dtype": arguments.dtype,
        "num_planes": 1 if arguments.mla else 2,
    }
    num_kv_heads = 1 if arguments.mla else arguments.heads
    num_tokens = rounded_tokens(arguments)
    source, target = (
        make_shape(tp, num_kv_heads, num_tokens // page_tokens, page_tokens=page_tokens, **common)
        for tp, page_tokens in zip((arguments.source, arguments.target), sizes, strict=True)
    )
    if misfits := incompatibilities(source, target):
        raise TopologyInvalid("; ".join(misfits))
    return source, target


def rounded_tokens(arguments: argparse.Namespace) -> int:
    """Whole pages on both sides, so that all handoffs move the same bytes."""
    largest: int = max(arguments.page_tokens)
    num_pages: int = -(-arguments.tokens // largest)
    return num_pages * largest


def num_pieces(source: KvShape, target: KvShape, num_tokens: int) -> list[int]:
    """Of each target rank."""
    blocks = lacking_blocks(source, target, 0, num_tokens)
    return [expected_pieces(source, target, rank, blocks) for rank in range(target.tp)]


def num_bytes_of_rank(source: KvShape, target: KvShape, num_tokens: int) -> int:
    """The same for each target rank."""
    return expected_bytes(source, target, lacking_blocks(source, target, 0, num_tokens))


def as_small(source: KvShape, target: KvShape, num_tokens: int) -> tuple[KvShape, int]:
    """A shape of as many ranks as the target, whose pages are as small as the pieces between the two, and the tokens
    that make up the same bytes."""
    num_rows = num_tokens * target.layout.num_planes * target.layout.num_kv_heads
    num_bytes = num_bytes_of_rank(source, target, num_tokens)
    piece_bytes = num_bytes // max(num_pieces(source, target, num_tokens))
    page_tokens = max(1, piece_bytes // target.layout.row_bytes)
    num_rows -= num_rows % page_tokens
    layout = {"num_layers": target.layout.num_layers, "head_dim": target.layout.head_dim, "dtype": target.layout.dtype}
    shape = make_shape(target.tp, target.tp, num_rows // page_tokens, page_tokens=page_tokens, num_planes=1, **layout)
    return shape, num_rows


def measure(provider: str, arguments: argparse.Namespace) -> list[Comparison]:
    """Raises PddError when a provider cannot be opened, or shapes do not fit."""
    source, target = asked_shapes(arguments)
    num_tokens, nics = rounded_tokens(arguments), arguments.nics
    small, num_small_tokens = as_small(source, target, num_tokens)
    pairs: list[Pair] = []
    try:
        pairs.append(Pair("asked", provider, source, target, num_tokens, nics=nics))
        pairs.append(Pair("equal", provider, target, target, num_tokens, nics=nics))
        pairs.append(Pair("equal, as small", provider, small, small, num_small_tokens, nics=nics))
        for pair in pairs:
            model = pair.fill()
            for _ in range(pair.source.shape.tp):  # by then all who hold the same heads have connected
                pair.seconds()
            pair.check(model)
        before = [pair.source.num_messages() for pair in pairs]
        rounds = [[pair.seconds() for pair in pairs] for _ in range(arguments.rounds)]
        return [
            _comparison(pair, [row[i] for row in rounds], pair.source.num_messages() - before[i])
            for i, pair in enumerate(pairs)
        ]
    finally:
        for pair in pairs:
            pair.close()


def _comparison(pair: Pair, seconds: list[float], num_messages: int) -> Comparison:
    source, target = pair.source.shape, pair.target.shape
    return Comparison(
        name=pair.name,
        source=_describe(source),
        target=_describe(target),
        num_bytes=target.tp * num_bytes_of_rank(source, target, pair.num_tokens),
        num_pieces=sum(num_pieces(source, target, pair.num_tokens)),
        num_messages=num_messages // len(seconds),
        seconds=seconds,
    )


def _describe(shape: KvShape) -> str:
    return f"tp{shape.tp}/{shape.layout.page_tokens}"


# What the user sees.


def _table(report: Report) -> Iterator[str]:
    info = report.provider
    yield (
        f"{info.provider} (libfabric {info.library_version}), {report.num_layers} layers, {report.num_tokens} tokens, "
        f"{report.num_nics} {'NIC' if report.num_nics == 1 else 'NICs'} a rank; "
        "from the announcement until every target rank has counted everything:"
    )
    yield (
        f"  {'':16}{'tp/page_tokens':>20}  {'MB':>7}  {'pieces':>7}  {'writes':>7}  {'piece':>9}  {'GB/s':>6}  "
        f"{'min - max':>13}  {'n':>3}  {'time':>6}"
    )
    base_s = report.results[1].median_s
    for row in report.results:
        slowest, fastest = row.gigabytes_per_s(max(row.seconds)), row.gigabytes_per_s(min(row.seconds))
        yield (
            f"  {row.name:16}{row.source + ' -> ' + row.target:>20}  {row.num_bytes / 1e6:>7.1f}  {row.num_pieces:>7}  "
            f"{row.num_messages:>7}  {row.num_bytes / row.num_pieces / 1024:>5.1f} KiB  "
            f"{row.gigabytes_per_s(row.median_s):>6.2f}  {f'{slowest:.2f} - {fastest:.2f}':>13}  "
            f"{len(row.seconds):>3}  {row.median_s / base_s:>5.2f}x"
        )
    asked, _, small = (row.median_s / base_s for row in report.results)
    yield f"  the asked shapes take {asked:.2f} times as long as equal ones; equal ones in pieces as small {small:.2f}"


def _tensor_parallel(text: str) -> int:
    match = re.fullmatch(r"tp(\d{1,3})", text)
    if not match or not int(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not like tp4")
    return int(match[1])


def _page_tokens(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d{1,5})(?::(\d{1,5}))?", text)
    sizes = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not all(sizes):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 16 or 16:32")
    return sizes


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--from", dest="source", type=_tensor_parallel, required=True, metavar="tpN",
                        help="tensor parallelism of the prefiller")  # fmt: skip
    parser.add_argument("--to", dest="target", type=_tensor_parallel, required=True, metavar="tpN",
                        help="tensor parallelism of the decoder")  # fmt: skip
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--heads", type=_positive, default=8, metavar="N", help="KV heads of the model")
    what.add_argument("--mla", action="store_true", help="one latent instead, which every rank holds")
    parser.add_argument(
        "--head-dim", type=_positive, metavar="N", help=f"default {HEAD_DIM}, or {LATENT_DIM} with --mla"
    )
    parser.add_argument("--page-tokens", type=_page_tokens, default=(16, 16), metavar="N[:M]",
                        help="of the prefiller, and of the decoder if they differ")  # fmt: skip
    parser.add_argument("--layers", type=_positive, default=4, metavar="N")
    parser.add_argument("--tokens", type=_positive, default=1024, metavar="N", help="rounded up to whole pages")
    parser.add_argument("--nics", type=_positive, default=1, metavar="N", help="of each rank: addresses of loopback")
    parser.add_argument("--dtype", choices=sorted(DTYPE_BYTES), default="bfloat16")
    parser.add_argument("--provider", default=PROVIDERS[Provider.TCP], metavar="NAME",
                        help="libfabric's names in order of choice, joined by commas")  # fmt: skip
    parser.add_argument(
        "--rounds", type=_positive, default=5, metavar="N", help="measured ones, after one that warms up"
    )
    parser.add_argument("--json", action="store_true", help="machine-readable, with every round")


def run(arguments: argparse.Namespace) -> int:
    """0: measured. Raises PddError where a provider cannot be opened or the shapes do not fit."""
    machine = this_machine()
    with swept():
        port = LibfabricPort(arguments.provider)
        provider = port.info
        port.close()
        results = measure(arguments.provider, arguments)
    report = Report(
        machine=machine,
        provider=provider,
        num_layers=arguments.layers,
        num_tokens=rounded_tokens(arguments),
        num_nics=arguments.nics,
        results=results,
    )
    if arguments.json:
        print(msgspec.json.encode(report).decode())
        return 0
    print(describe(machine))
    print(*_table(report), sep="\n")
    return 0
