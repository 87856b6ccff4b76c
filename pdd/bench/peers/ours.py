"""pdd's own port among its peers: one `write` a round; the target knows by its count. `variant` names the provider."""

from __future__ import annotations

from collections.abc import Sequence

from pdd.base.ids import Immediate
from pdd.bench.fabric import End, pieces_of
from pdd.bench.peers import pair
from pdd.bench.peers.pair import Line, Round, Seen
from pdd.fabric.immediate import NUM_GENERATIONS, pack
from pdd.fabric.port import CountReached, Write, WriteDone


def _immediate(job: Round) -> Immediate:
    return pack(1, job.number % NUM_GENERATIONS)


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._end = End(variant, arena_bytes, line)
        self.arena = self._end.arena
        self._write: Write | None = None

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._write = self._end.spec(_immediate(job), job.page_bytes, tuple(target_pages))

    def write(self) -> None:
        assert self._write is not None
        self._end.port.write(self._write)
        done = self._end.wait(WriteDone)
        if done.error:
            raise RuntimeError(f"the write ended with errno {done.error}")

    def close(self) -> None:
        self._end.port.close()


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self._end = End(variant, arena_bytes, line)
        self.arena = self._end.arena
        info = self._end.port.info
        self.version = f"{info.provider}, libfabric {info.library_version}, up to {info.pages_per_write} pages a write"

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._end.port.expect(_immediate(job), job.num_pages * len(pieces_of(job.page_bytes)))

    def wait(self) -> Seen:
        return Seen(end_s=self._end.wait(CountReached).last_s)

    def close(self) -> None:
        self._end.port.close()
