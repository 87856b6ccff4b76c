"""Plain TCP on loopback, what a program without a fabric would write: `vectored` hands the kernel as many pages a call
as it takes, `paged` one. The target knows by the last byte."""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from pdd.bench.peers import pair
from pdd.bench.peers.pair import Arena, Line, Round, Seen

HOST = "127.0.0.1"
PAGES_PER_CALL = {"vectored": 1024, "paged": 1}  # IOV_MAX


def _calls(variant: str, arena: Arena, job: Round, pages: Sequence[int]) -> list[list[memoryview]]:
    views = [arena.page(page, job.page_bytes) for page in pages]
    step = PAGES_PER_CALL[variant]
    return [views[start : start + step] for start in range(0, len(views), step)]


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._variant, self.arena = variant, Arena(arena_bytes)
        self._socket = socket.create_connection((HOST, line.hear()))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._calls: list[list[memoryview]] = []

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._calls = _calls(self._variant, self.arena, job, range(job.num_pages))

    def write(self) -> None:
        for views in self._calls:
            if self._socket.sendmsg(views) != sum(map(len, views)):  # a blocking socket takes all
                raise RuntimeError("the kernel took only a part of a message")


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._variant, self.arena = variant, Arena(arena_bytes)
        with socket.create_server((HOST, 0)) as server:
            line.say(server.getsockname()[1])
            self._socket = server.accept()[0]
        self.version = "sockets"
        self._calls: list[list[memoryview]] = []

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._calls = _calls(self._variant, self.arena, job, target_pages)

    def wait(self) -> Seen:
        for views in self._calls:
            if self._socket.recvmsg_into(views, 0, socket.MSG_WAITALL)[0] != sum(map(len, views)):
                raise RuntimeError("the connection ended in the middle of a page")
        return Seen(end_s=time.monotonic())
