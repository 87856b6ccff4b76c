"""NIXL: one request of prepared descriptors a round; the target knows by the notification that follows the pages.

Descriptor lists are prepared once for each page size, as NIXL wants it, and the request is made before the clock
starts.
"""

from __future__ import annotations

import base64
import importlib.metadata
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config
from nixl._bindings import nixlNotFoundError

from pdd.bench.peers import pair
from pdd.bench.peers.pair import Arena, Line, Round, Seen

DEVICE = 0


class Configuration(NamedTuple):
    """Without a progress thread both sides poll. `pause` comes between two looks: polling without ever yielding costs
    NIXL half of its rate on few cores that have other work too."""

    backend: str
    options: Mapping[str, str] = {}
    progress_thread: bool = False
    pause: Callable[[], None] = os.sched_yield


CONFIGURATIONS = {
    "ucx": Configuration("UCX"),
    "ucx-thread": Configuration("UCX", progress_thread=True, pause=partial(time.sleep, 20e-6)),
    "ucx-tuned": Configuration("UCX", {"ucx_error_handling_mode": "none"}),
    "libfabric": Configuration("LIBFABRIC"),
}


class Agent:
    """One side, with its arena."""

    def __init__(self, name: str, variant: str, arena: Arena) -> None:
        backend, options, progress_thread, self.pause = CONFIGURATIONS[variant]
        self.api = nixl_agent(name, nixl_agent_config(enable_prog_thread=progress_thread, backends=[]))
        try:
            self.api.create_backend(backend, dict(options))
        except nixlNotFoundError as error:
            raise RuntimeError(f"NIXL's {backend} does not load: a library that it needs is missing or old") from error
        self.api.register_memory([(arena.address, arena.num_bytes, DEVICE, "")], "DRAM", [backend])


def _meet(agent: Any, line: Line) -> str:
    line.say(base64.b64encode(agent.get_agent_metadata()).decode())
    name = agent.add_remote_agent(base64.b64decode(line.hear()))
    return name.decode() if isinstance(name, bytes) else str(name)


def _pages(base: int, job: Round) -> Any:
    """[page, (address, bytes, device)]"""
    addresses = base + np.arange(job.num_pages, dtype=np.uint64) * np.uint64(job.page_bytes)
    return np.column_stack((addresses, np.full_like(addresses, job.page_bytes), np.full_like(addresses, DEVICE)))


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)
        self._agent = Agent("source", variant, self.arena)
        self._line = line
        self._peer = _meet(self._agent.api, line)
        self._peer_base = line.hear()
        self._lists: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._request: Any = None

    def _prepared(self, job: Round) -> tuple[Any, Any]:
        shape = (job.page_bytes, job.num_pages)
        if shape not in self._lists:
            here = self._agent.api.prep_xfer_dlist("NIXL_INIT_AGENT", _pages(self.arena.address, job), "DRAM")
            there = self._agent.api.prep_xfer_dlist(self._peer, _pages(self._peer_base, job), "DRAM")
            self._lists[shape] = here, there
        return self._lists[shape]

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        here, there = self._prepared(job)
        source_pages = np.arange(job.num_pages, dtype=np.int32)
        if self._request is not None:
            self._request.release()
        self._request = self._agent.api.make_prepped_xfer(
            "WRITE", here, source_pages, there, np.array(target_pages, dtype=np.int32), b"done"
        )

    def write(self) -> None:
        state = self._agent.api.transfer(self._request)
        while state == "PROC":
            self._agent.pause()
            state = self._agent.api.check_xfer_state(self._request)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in {state}")
        while not self._line.waits():  # its notification moves only while someone polls
            self._agent.api.get_new_notifs()
            self._agent.pause()
        self._line.hear()


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)
        self._agent = Agent("target", variant, self.arena)
        self._line = line
        _meet(self._agent.api, line)
        line.say(self.arena.address)
        self.version = f"NIXL {importlib.metadata.version('nixl')}"

    def wait(self) -> Seen:
        while not self._agent.api.get_new_notifs():
            self._agent.pause()
        arrived_s = time.monotonic()
        self._line.say("arrived")
        return Seen(end_s=arrived_s)
