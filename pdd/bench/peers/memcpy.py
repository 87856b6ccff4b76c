"""One thread that copies pages within a process, in a plain loop. All of it happens in the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from pdd.bench.peers import pair
from pdd.bench.peers.pair import Arena, Line, Round, Seen, stamp


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        pass

    def write(self) -> None:
        pass


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena, self._other = Arena(arena_bytes), Arena(arena_bytes)
        self.version = f"numpy {np.__version__}"
        self._copy: tuple[Any, Any, Any] = (None, None, None)

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        """The same pairs of pages, by rising target page: `take` moves each with one memcpy."""
        stamp(self._other.view, job)
        shape, num_bytes = (job.num_pages, job.page_bytes), job.num_pages * job.page_bytes
        here = np.frombuffer(self._other.view[:num_bytes], np.uint8).reshape(shape)
        there = np.frombuffer(self.arena.view[:num_bytes], np.uint8).reshape(shape)
        self._copy = here, np.argsort(np.array(target_pages)), there

    def wait(self) -> Seen:
        here, source_pages, there = self._copy
        start_s = time.monotonic()
        np.take(here, source_pages, axis=0, out=there, mode="clip")  # "raise" would copy twice
        return Seen(start_s, time.monotonic())
