"""pdd's own port among its peers: one `write` a round; the target knows by its count. `variant` names the provider.

The target waits as a daemon does, with its port among the readers of an asyncio loop; but a round ends when the port's
own thread has counted the last piece, as it is for a peer that polls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import uvloop

from pdd.base.ids import Immediate
from pdd.bench.contender import COPY
from pdd.bench.fabric import PATIENCE_S, End, pieces_of
from pdd.bench.peers import pair
from pdd.bench.peers.pair import Line, Round, Seen
from pdd.fabric.immediate import NUM_GENERATIONS, pack
from pdd.fabric.port import CountReached, Write, WriteDone


def _immediate(job: Round) -> Immediate:
    return pack(1, job.number % NUM_GENERATIONS)


def _described(end: End) -> str:
    if end.name == COPY:
        return "copies between mapped arenas (memfd)"
    info = end.port.info
    return f"{info.provider}, libfabric {info.library_version}, up to {info.pages_per_write} pages a write"


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._end = End(variant, arena_bytes, line)
        self.arena = self._end.arena
        self._write: Write | None = None

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._write = self._end.spec(_immediate(job), job.page_bytes, target_pages)

    def write(self) -> None:
        assert self._write is not None
        self._end.port.write(self._write)
        done = self._end.wait(WriteDone)
        if done.error:
            raise RuntimeError(f"the write ended with errno {done.error}")

    def close(self) -> None:
        self._end.close()


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._end = End(variant, arena_bytes, line)
        self.arena = self._end.arena
        self._loop = uvloop.new_event_loop()
        self._loop.add_reader(self._end.port.fileno(), self._poll)
        self._reached: asyncio.Future[Seen] = self._loop.create_future()
        self._copied_bytes = 0
        self.version = _described(self._end)

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._reached = self._loop.create_future()
        self._check_copied(job.number)
        self._end.port.expect(_immediate(job), job.num_pages * len(pieces_of(job.page_bytes)))

    def wait(self) -> Seen:
        return self._loop.run_until_complete(asyncio.wait_for(self._reached, PATIENCE_S))

    def _check_copied(self, number: int) -> None:
        """Raises RuntimeError when nothing of the round before this one was copied: what came over the NIC must not
        pass for copies. The first round is left out: a port takes the NIC until both sides have mapped the other's."""
        before, self._copied_bytes = self._copied_bytes, self._end.port.statistics()["num_copied_bytes"]
        if self._end.name == COPY and number > 1 and self._copied_bytes == before:
            raise RuntimeError("the pages came over the NIC instead of being copied")

    def _poll(self) -> None:
        for event in self._end.port.events():
            if isinstance(event, CountReached):
                self._reached.set_result(Seen(end_s=event.last_s, looped_s=time.monotonic()))

    def close(self) -> None:
        self._loop.close()
        self._end.close()
