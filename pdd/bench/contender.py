"""Who takes part in `pdd bench fabric`, and their processes: pdd itself, other fabrics, and what the machine gives.

A peer is an optional package, found in any interpreter (`--peer-python`), never a dependency. Processes whose turn it
is not are stopped: a fabric that polls while it has nothing to do costs nobody anything.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Any

import msgspec

import pdd
from pdd.base.errors import PddError
from pdd.bench.peers.pair import Complaint, Line, Took

PATIENCE_S = 120.0
"""For one answer: a slow peer on a busy machine needs a while for a round of small pages."""
GOODBYE_S = 10.0
NUM_LAST_LINES = 5
COPY = "copy"
"""Stands among the providers for what two processes of one machine do without any (`fabric.same_host`)."""
SAME_HOST_PROVIDERS = {"shm", COPY}


class Route(StrEnum):
    """Only contenders of one route are compared."""

    NETWORK = "through the network stack"
    SAME_HOST = "within the host"


class Contender(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    route: Route
    module: str
    """Of pdd.bench.peers."""
    variant: str = ""
    package: str = ""
    """What to install; empty: nothing beyond pdd."""
    environment: dict[str, str] = {}
    note: str = ""
    """What a reader of its figures must know."""


def _nixl(name: str, route: Route, variant: str, **environment: str) -> Contender:
    note = "NIXL: requests prepared before the clock starts; ends with the target's notification"
    return Contender(
        name=name, route=route, module="nixl", variant=variant, package="nixl", environment=environment, note=note
    )


PEERS: dict[str, tuple[Contender, ...]] = {
    "nixl": (
        _nixl("nixl-tcp", Route.NETWORK, "ucx", UCX_TLS="tcp"),
        _nixl("nixl-tcp-thread", Route.NETWORK, "ucx-thread", UCX_TLS="tcp"),
        _nixl("nixl-libfabric", Route.NETWORK, "libfabric"),
        _nixl("nixl-default", Route.SAME_HOST, "ucx"),
        _nixl("nixl-tuned", Route.SAME_HOST, "ucx-tuned"),
    ),
    "mooncake": (
        Contender(
            name="mooncake",
            route=Route.NETWORK,
            module="mooncake",
            variant="tcp",
            package="mooncake-transfer-engine",
            environment={"MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "8192"},
            note="Mooncake: ends with the source's completion, for its target is not told; that favours it",
        ),
    ),
    "memcpy": (
        Contender(
            name="memcpy",
            route=Route.SAME_HOST,
            module="memcpy",
            note="memcpy: a plain loop of memcpy in one thread of one process, without any hand-over",
        ),
    ),
    "tcp": (
        Contender(
            name="tcp-vectored",
            route=Route.NETWORK,
            module="tcp",
            variant="vectored",
            note="tcp: sockets, 1024 pages a call (vectored) or one (paged)",
        ),
        Contender(name="tcp-paged", route=Route.NETWORK, module="tcp", variant="paged"),
    ),
}
"""What `--vs` knows, in groups. nixl-default copies between processes (CMA); nixl-tuned: error handling mode none."""


class ContenderMissing(PddError):
    """Its package is not installed, or it does not open here: it is left out."""


class ContenderFailed(PddError):
    """It opened, and then did not move all pages."""


def pdd_contender(provider: str) -> Contender:
    """`provider`: libfabric's names, joined by commas."""
    name = provider.split(",", 1)[0]
    note = (
        "pdd copy: arenas are memfds, as executors make them; all others' are anonymous memory" if name == COPY else ""
    )
    route = Route.SAME_HOST if name in SAME_HOST_PROVIDERS else Route.NETWORK
    return Contender(name=f"pdd {name}", route=route, module="ours", variant=provider, note=note)


def parse_peers(text: str) -> tuple[Contender, ...]:
    """Contenders by name or by group, joined by commas; `all`. Raises ValueError."""
    by_name = {each.name: (each,) for group in PEERS.values() for each in group}
    known = {**by_name, **PEERS, "all": tuple(each for group in PEERS.values() for each in group)}
    words = [word for word in text.split(",") if word]
    unknown = [word for word in words if word not in known]
    if unknown or not words:
        raise ValueError(f"{', '.join(unknown) or 'nothing'} is none of {', '.join(known)}")
    return tuple({each.name: each for word in words for each in known[word]}.values())


def _program(contender: Contender, arena_bytes: int, bench_fd: int) -> str:
    """Gives another interpreter `pdd.bench.peers` and nothing else of the place where pdd is installed."""
    return (
        "import sys, types\n"
        "sys.modules['pdd'] = pdd = types.ModuleType('pdd')\n"
        f"pdd.__path__ = {list(pdd.__path__)!r}\n"
        "from pdd.bench.peers.pair import main\n"
        f"main('pdd.bench.peers.{contender.module}', {contender.variant!r}, {arena_bytes}, {bench_fd})\n"
    )


class Running:
    """The processes of one contender. Raises ContenderMissing when it does not open."""

    def __init__(self, contender: Contender, python: Path, arena_bytes: int) -> None:
        self.contender = contender
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed with the process)
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self._line = Line(ours)
        try:
            with theirs:
                self._process = self._start(python, arena_bytes, theirs.fileno())
        except OSError as error:
            self._line.close()
            self._log.close()
            raise ContenderMissing(f"{python} does not start: {error.strerror}") from error
        try:
            hello = self._hear()
            if "missing" in hello:
                package = contender.package or contender.module
                raise ContenderMissing(f"{hello['missing']} (is {package} installed for {python}?)")
            self.version: str = hello["version"]
        except ContenderFailed as error:
            self.close()
            raise ContenderMissing(f"does not open here: {error}") from error
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def _start(self, python: Path, arena_bytes: int, bench_fd: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [python, "-c", _program(self.contender, arena_bytes, bench_fd)],
            env={**os.environ, **self.contender.environment},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=[bench_fd],
            cwd="/",  # where -c looks for modules first
            start_new_session=True,
        )

    def turn(self, page_bytes: int, num_pages: int, count: int) -> list[Took]:
        """Moves the pages `count` times. Raises ContenderFailed."""
        self._signal(signal.SIGCONT)
        try:
            self._line.say([page_bytes, num_pages, count])
        except OSError as error:
            raise ContenderFailed(f"it has ended: {self._last_words()}") from error
        took = [Took(*each) for each in self._hear()["took"]]
        self._signal(signal.SIGSTOP)
        return took

    def _hear(self) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._line.hear()
        except TimeoutError as error:
            raise ContenderFailed(f"no answer within {PATIENCE_S:.0f} s") from error
        except Complaint as error:
            raise ContenderFailed(str(error)) from error
        except (OSError, EOFError) as error:
            raise ContenderFailed(f"it has ended: {self._last_words()}") from error
        return answer

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return " / ".join(lines[-NUM_LAST_LINES:]) or "without a word"

    def _signal(self, number: int) -> None:
        """To both of its processes, which are a group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Lets it clean up, and kills it when that takes too long. May be called again."""
        if self._process.returncode is not None:
            return
        with contextlib.suppress(OSError):
            self._line.close()
        self._signal(signal.SIGCONT)
        try:
            self._process.wait(GOODBYE_S)
        except subprocess.TimeoutExpired:
            pass
        finally:
            self._signal(signal.SIGKILL)
            self._process.wait()
            self._log.close()
