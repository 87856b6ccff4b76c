"""A contender of `pdd bench fabric`: two processes that move pages from one's arena to shuffled places of the other's.

    bench --- "a round" ---> target --- "prepare" ---> source      one line of JSON each way
    bench <--- seconds ----- target <====== pages ==== source      clocks: CLOCK_MONOTONIC is one for both processes

Runs in whatever interpreter has the peer's package: this file and those of the peers beside it (ours.py apart) import
the standard library, the peer and what the peer needs, nothing else of pdd's. Each peer's module has two classes,
`Source` and `Target` (below).
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import mmap
import os
import random
import select
import signal
import socket
import sys
import time
import traceback
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

HUGE_PAGE_BYTES = 2 << 20
WORD_BYTES = 8
PR_SET_PDEATHSIG = 1
GOODBYE_S = 5.0
"""For the source to close what it has open, before it is killed with the target."""


class Complaint(Exception):
    """What the other process died of."""


class Line:
    """One side of a conversation in JSON lines."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._file = end.makefile("rw", encoding="utf-8")

    def say(self, message: object) -> None:
        print(json.dumps(message), file=self._file, flush=True)

    def hear(self) -> Any:
        """Raises Complaint or EOFError when the other side has ended, TimeoutError when the socket has a timeout."""
        text = self._file.readline()
        if not text:
            raise EOFError("the other process has ended")
        message = json.loads(text)
        if isinstance(message, dict) and "error" in message:
            raise Complaint(message["error"])
        return message

    def complain(self, error: Exception) -> None:
        """The last words, if anybody listens."""
        with contextlib.suppress(OSError):
            self.say({"error": str(error) if isinstance(error, Complaint) else f"{type(error).__name__}: {error}"})

    def waits(self) -> bool:
        """True when there is something to hear."""
        return bool(select.select([self._end], [], [], 0)[0])

    def close(self) -> None:
        try:
            self._file.close()  # may have something left to say to an end that is gone
        finally:
            self._end.close()


def socket_lines() -> tuple[Line, Line]:
    """Both ends of a new conversation."""
    ours, theirs = socket.socketpair()
    return Line(ours), Line(theirs)


class Arena:
    """Anonymous memory that begins on a huge page, touched once."""

    def __init__(self, num_bytes: int) -> None:
        self._map = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES)
        with contextlib.suppress(OSError):  # a kernel without huge pages
            self._map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.address = -(-start // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
        self.num_bytes = num_bytes
        self.view = memoryview(self._map)[self.address - start :][:num_bytes]
        ctypes.memset(self.address, 1, num_bytes)

    def page(self, number: int, page_bytes: int) -> memoryview:
        return self.view[number * page_bytes :][:page_bytes]


class Round(NamedTuple):
    """What is to be moved: source page i to page `target_pages()[i]`."""

    number: int
    page_bytes: int
    num_pages: int

    def target_pages(self) -> list[int]:
        return random.Random(self.number).sample(range(self.num_pages), self.num_pages)  # noqa: S311 (a shuffle)

    def stamps(self) -> array[int]:
        return array("Q", range(self.number << 32, (self.number << 32) + self.num_pages))


class Source(Protocol):
    """Base of every peer's: `Source(variant, arena_bytes, line)` meets the target, over the line if it needs to."""

    arena: Arena

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        """All that the peer lets one do before the clock starts."""

    def write(self) -> None:
        """Posts all pages, and returns when the source is told that they are done."""

    def close(self) -> None:
        """Removes what would outlive the process."""
        return


class Seen(NamedTuple):
    """time.monotonic() of a round's begin and end where the target saw them; the source's own stand in for None.
    `looped_s`: when an asyncio loop in the target's process had been told of the end, where there is one."""

    start_s: float | None = None
    end_s: float | None = None
    looped_s: float | None = None


class Target(Protocol):
    """`Target(variant, arena_bytes, line)`. `version` is what was opened, for the reader of a table."""

    arena: Arena
    version: str

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        """As the source's."""
        return

    def wait(self) -> Seen:
        """Returns when the target knows that all is there, or at once when only the source can know."""

    def close(self) -> None:
        """Removes what would outlive the process."""
        return


def stamped_words(view: memoryview, job: Round) -> tuple[memoryview, memoryview]:
    """The first and the last word of every page."""
    words = view[: job.page_bytes * job.num_pages].cast("Q")
    step = job.page_bytes // WORD_BYTES
    return words[::step], words[step - 1 :: step]


def stamp(view: memoryview, job: Round) -> None:
    first, last = stamped_words(view, job)
    stamps = memoryview(job.stamps())
    first[:] = stamps
    last[:] = stamps


def check(view: memoryview, job: Round, target_pages: Sequence[int]) -> None:
    """Raises RuntimeError unless every page is where it should be."""
    stamps = job.stamps().tolist()
    for words in stamped_words(view, job):
        found = words.tolist()
        stale = sum(found[page] != wanted for page, wanted in zip(target_pages, stamps, strict=True))
        if stale:
            raise RuntimeError(f"{stale} of {job.num_pages} pages of {job.page_bytes} bytes were not there at the end")


def serve_source(source: Source, line: Line) -> None:
    """Writes what the target asks for, until the line is closed."""
    while True:
        job = Round(*line.hear())
        source.prepare(job, job.target_pages())
        stamp(source.arena.view, job)
        line.say("ready")
        line.hear()
        start_s = time.monotonic()
        source.write()
        line.say([start_s, time.monotonic()])


class Took(NamedTuple):
    """From before the first page is posted until all are known to be there, and until an asyncio loop knew it."""

    seconds: float
    looped_seconds: float | None


def measure_round(job: Round, target: Target, line: Line) -> Took:
    """Raises RuntimeError when the pages are not there at the end."""
    line.say(job)
    target_pages = job.target_pages()
    target.prepare(job, target_pages)
    line.hear()
    line.say("go")
    seen = target.wait()
    start_s, end_s = (theirs if own is None else own for own, theirs in zip(seen[:2], line.hear(), strict=True))
    check(target.arena.view, job, target_pages)
    return Took(end_s - start_s, None if seen.looped_s is None else seen.looped_s - start_s)


def serve_target(target: Target, line: Line, bench: Line) -> None:
    """Runs the rounds that the bench asks for, until it closes its line."""
    number = 0
    while True:
        page_bytes, num_pages, count = bench.hear()
        jobs = [Round(number + i, page_bytes, num_pages) for i in range(count)]
        number += count
        bench.say({"took": [measure_round(job, target, line) for job in jobs]})


def _die_with_parent() -> None:
    """Even if stopped: the bench stops those whose turn it is not."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _load(module: str, bench: Line) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        bench.say({"missing": str(error)})
        os._exit(0)


def _run_source(module: str, variant: str, arena_bytes: int, line: Line) -> None:
    with contextlib.suppress(ImportError, EOFError):  # the target says so
        source = importlib.import_module(module).Source(variant, arena_bytes, line)
        with contextlib.closing(source):
            serve_source(source, line)


def _run_target(module: str, variant: str, arena_bytes: int, line: Line, bench: Line) -> None:
    target = _load(module, bench).Target(variant, arena_bytes, line)
    with contextlib.closing(target):
        bench.say({"version": target.version})
        serve_target(target, line, bench)


def _wait_for(pid: int) -> None:
    """Until a child has ended, or ought to have."""
    pid_fd = os.pidfd_open(pid)
    select.select([pid_fd], [], [], GOODBYE_S)
    os.close(pid_fd)


def main(module: str, variant: str, arena_bytes: int, bench_fd: int) -> NoReturn:
    """The target's process. Forks the source before the peer is loaded: few fabrics survive a fork."""
    bench = Line(socket.socket(fileno=bench_fd))
    _die_with_parent()
    ours, theirs = socket_lines()
    source_pid = os.fork()
    is_source = not source_pid
    try:
        if is_source:
            _die_with_parent()
            ours.close()
            _run_source(module, variant, arena_bytes, theirs)
        else:
            theirs.close()
            _run_target(module, variant, arena_bytes, ours, bench)
    except Exception as error:
        traceback.print_exc()
        (theirs if is_source else bench).complain(error)
    finally:
        if not is_source:
            with contextlib.suppress(OSError):
                ours.close()  # which ends the source
            _wait_for(source_pid)
        sys.stderr.flush()
        os._exit(0)  # no peer's destructor may hold up the bench
