"""`pdd bench fabric`: what the handoff's third step, moving KV pages, costs on this machine; alone, or beside others.

Each contender is two processes with an arena each (peers/pair.py). The source writes all pages of its
arena to shuffled places of the target's; a round ends when the target has counted every page, not when the source is
told that it is done. `--vs` lets others move the same pages in turn with pdd, so that noise hits all alike.
"""

from __future__ import annotations

import argparse
import ctypes
import select
import shutil
import sys
from array import array
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec

from pdd.base.errors import FabricUnavailable, OperatorError
from pdd.base.ids import Immediate
from pdd.bench.compare import LeftOut, Plan, measure
from pdd.bench.compare_text import alone, beside
from pdd.bench.contender import COPY, PEERS, Contender, ContenderMissing, Running, parse_peers, pdd_contender
from pdd.bench.machine import describe, this_machine
from pdd.bench.peers.pair import Arena, Line
from pdd.bench.plot import check_plot, plot
from pdd.bench.posting import measure_posting
from pdd.bench.swept import swept
from pdd.fabric.libfabric import PROVIDERS, LibfabricPort
from pdd.fabric.port import CountReached, Piece, Token, Write, WriteDone
from pdd.memory.arena import SharedMemory
from pdd.topology.model import Fabric, Provider
from pdd.transfer.plan import split

KIB, MIB = 1 << 10, 1 << 20
PATIENCE_S = 30.0
Awaited = TypeVar("Awaited", CountReached, WriteDone)


def pieces_of(page_bytes: int) -> tuple[Piece, ...]:
    """A page as handoffs send it: in pieces, each of which is counted."""
    return tuple(split(Piece(0, 0, page_bytes)))


class SharedArena(Arena):
    """A memfd, as executors make them: what a peer of this machine can map."""

    def __init__(self, num_bytes: int) -> None:
        memory = SharedMemory(SharedMemory.make_fd("pdd-bench", num_bytes), num_bytes)
        self.fd, self.address, self.num_bytes, self.view = memory.fd, memory.address, num_bytes, memory.buffer()
        self._memory = memory
        ctypes.memset(self.address, 1, num_bytes)


class End:
    """One process's port and arena, and the peer's once they have met. Raises FabricUnavailable."""

    def __init__(self, provider: str, arena_bytes: int, line: Line, spin_us: int = Fabric().spin_us) -> None:
        copies = provider == COPY
        names = PROVIDERS[Provider.TCP] if copies else provider
        self.port = LibfabricPort(names, spin_us=spin_us, copies=copies)
        self.name = COPY if copies else self.port.info.provider
        """Of what moves the pages."""
        shared = SharedArena(arena_bytes) if copies else None
        self.arena = shared or Arena(arena_bytes)
        self.arena_bytes = arena_bytes
        try:
            self.memory = self.port.register(self.arena.address, arena_bytes, shared.fd if shared else -1)
            line.say(self.memory.address.hex())
            self.peer = self.port.add_peer(bytes.fromhex(line.hear()))
        except BaseException:
            self.port.close()
            raise

    def spec(self, immediate: Immediate, page_bytes: int, target_pages: Sequence[int]) -> Write:
        return Write(
            token=Token(immediate),
            peer=self.peer,
            memory=self.memory.memory,
            immediate=immediate,
            num_layers=1,
            source_base=self.arena.address,
            source_layer_bytes=self.arena_bytes,
            source_page_bytes=page_bytes,
            target_base=0,
            target_layer_bytes=self.arena_bytes,
            target_page_bytes=page_bytes,
            source_pages=array("I", range(len(target_pages))),
            target_pages=array("I", target_pages),
            pieces=pieces_of(page_bytes),
        )

    def close(self) -> None:
        """Once: the port is gone then."""
        self.port.close()

    def wait(self, kind: type[Awaited]) -> Awaited:
        """The next event of a kind."""
        ready = select.poll()
        ready.register(self.port, select.POLLIN)
        while ready.poll(PATIENCE_S * 1000):
            for event in self.port.events():
                if isinstance(event, kind):
                    return event
        raise TimeoutError(f"no {kind.__name__} within {PATIENCE_S:.0f} s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--provider", nargs="+", default=["net,tcp", COPY], metavar="NAME",
                        help=f"libfabric's names, joined by commas: the first that there is; or {COPY}")  # fmt: skip
    parser.add_argument("--vs", type=_peers, default=(), metavar="PEER,...",
                        help=f"who else moves the same pages in turn: {', '.join(PEERS)}, or all")  # fmt: skip
    parser.add_argument("--peer-python", type=_python, default=Path(sys.executable), metavar="PATH",
                        help="interpreter that has the peers' packages (default: this one)")  # fmt: skip
    parser.add_argument("--page-kib", nargs="+", type=positive, default=[4, 16, 32, 64, 256, 1024], metavar="KIB")
    parser.add_argument("--latency-kib", nargs="+", type=positive, default=[4, 64], metavar="KIB")
    parser.add_argument("--arena-mib", type=positive, default=256, metavar="MIB", help="bytes of one round")
    parser.add_argument("--rounds", type=positive, default=5, metavar="N",
                        help="measured rounds of each size, after one that warms up")  # fmt: skip
    parser.add_argument("--writes", type=positive, default=500, metavar="N", help="writes of one page for the latency")
    parser.add_argument("--json", action="store_true", help="machine-readable, with every round")
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="draw it too (needs matplotlib)")


def positive(text: str) -> int:
    """For argparse."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return int(text)


def _python(text: str) -> Path:
    """Absolute, but not resolved: a virtual environment's interpreter is a link, and knows by its name what it is."""
    return Path(shutil.which(text) or text).absolute()


def _peers(text: str) -> tuple[Contender, ...]:
    try:
        return parse_peers(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _contenders(providers: Sequence[str]) -> list[Contender]:
    """pdd's own. Raises OperatorError when two would have the same name."""
    found: dict[str, Contender] = {}
    for contender in map(pdd_contender, providers):
        if other := found.get(contender.name):
            raise OperatorError(
                f"--provider: {other.variant} and {contender.variant} would both be `{contender.name}` in the tables: "
                "each is measured once"
            )
        found[contender.name] = contender
    return list(found.values())


def _plan(arguments: argparse.Namespace) -> Plan:
    """Each size once. Raises OperatorError when a page does not fit into the arena."""
    plan = Plan(
        arena_bytes=arguments.arena_mib * MIB,
        page_bytes=[size * KIB for size in dict.fromkeys(arguments.page_kib)],
        num_rounds=arguments.rounds,
        latency_page_bytes=[size * KIB for size in dict.fromkeys(arguments.latency_kib)],
        num_writes=arguments.writes,
    )
    if max(plan.page_bytes + plan.latency_page_bytes) > plan.arena_bytes:
        raise OperatorError(f"a page is larger than the {arguments.arena_mib} MiB of a round (--arena-mib)")
    return plan


def _open(arguments: argparse.Namespace, plan: Plan, stack: ExitStack) -> tuple[list[Running], list[LeftOut]]:
    """pdd's own must open (FabricUnavailable); a peer that does not is left out."""
    runners, left_out = [], []
    for ours in _contenders(arguments.provider):
        try:
            runners.append(Running(ours, Path(sys.executable), plan.arena_bytes))
        except ContenderMissing as error:
            raise FabricUnavailable(f"{ours.variant}: {error}") from error
        stack.callback(runners[-1].close)
    for peer in arguments.vs:
        try:
            runners.append(Running(peer, arguments.peer_python, plan.arena_bytes))
        except ContenderMissing as error:
            left_out.append(LeftOut(peer.name, str(error)))
        else:
            stack.callback(runners[-1].close)
    if arguments.vs and len(left_out) == len(arguments.vs):
        raise OperatorError(f"no peer to compare with: {'; '.join(f'{each.name}: {each.reason}' for each in left_out)}")
    return runners, left_out


def _progress(text: str) -> None:
    if sys.stderr.isatty():
        print(text, file=sys.stderr)


def run(arguments: argparse.Namespace) -> int:
    """0: measured. 1: somebody failed on the way. Raises FabricUnavailable and OperatorError before the first round."""
    if arguments.plot is not None:
        check_plot(arguments.plot)
    plan, machine = _plan(arguments), this_machine()
    with swept(), ExitStack() as stack:
        runners, left_out = _open(arguments, plan, stack)
        report = measure(runners, left_out, machine, plan, _progress)
    posting = measure_posting(PROVIDERS[Provider.TCP], plan.num_writes)
    report = msgspec.structs.replace(report, posting=posting)
    if arguments.json:
        print(msgspec.json.encode(report).decode())
    else:
        print(describe(machine))
        print(*(beside(report) if arguments.vs else alone(report)), sep="\n")
        print(posting.text(), flush=True)
    if arguments.plot is not None:  # last: a picture that fails loses nothing
        plot(report, arguments.plot)
    return int(any(each.failure for each in report.entrants))
