"""NIXL: one request of prepared descriptors a round; the target knows by the notification that follows the pages.

Descriptor lists are prepared once for each page size, as NIXL wants it, and the request is made before the clock
starts.
"""

from __future__ import annotations

import base64
import importlib.metadata
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from pdd.bench.peers import pair
from pdd.bench.peers.pair import Arena, Line, Round, Seen

BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "ucx": ("UCX", {}),
    "ucx-tuned": ("UCX", {"ucx_error_handling_mode": "none"}),
    "libfabric": ("LIBFABRIC", {}),
}
DEVICE = 0


def _open_agent(name: str, variant: str, arena: Arena) -> Any:
    """No progress thread: both sides poll, and on few cores a third and a fourth thread only take turns with them."""
    backend, options = BACKENDS[variant]
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.create_backend(backend, options)
    agent.register_memory([(arena.address, arena.num_bytes, DEVICE, "")], "DRAM", [backend])
    return agent


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
        self._agent = _open_agent("source", variant, self.arena)
        self._line = line
        self._peer = _meet(self._agent, line)
        self._peer_base = line.hear()
        self._lists: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._request: Any = None

    def _prepared(self, job: Round) -> tuple[Any, Any]:
        shape = (job.page_bytes, job.num_pages)
        if shape not in self._lists:
            here = self._agent.prep_xfer_dlist("NIXL_INIT_AGENT", _pages(self.arena.address, job), "DRAM")
            there = self._agent.prep_xfer_dlist(self._peer, _pages(self._peer_base, job), "DRAM")
            self._lists[shape] = here, there
        return self._lists[shape]

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        here, there = self._prepared(job)
        source_pages = np.arange(job.num_pages, dtype=np.int32)
        if self._request is not None:
            self._request.release()
        self._request = self._agent.make_prepped_xfer(
            "WRITE", here, source_pages, there, np.array(target_pages, dtype=np.int32), b"done"
        )

    def write(self) -> None:
        state = self._agent.transfer(self._request)
        while state == "PROC":
            state = self._agent.check_xfer_state(self._request)
        if state != "DONE":
            raise RuntimeError(f"NIXL's transfer ended in {state}")
        while not self._line.waits():  # its notification moves only while someone polls
            self._agent.get_new_notifs()
        self._line.hear()


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)
        self._agent = _open_agent("target", variant, self.arena)
        self._line = line
        _meet(self._agent, line)
        line.say(self.arena.address)
        self.version = f"NIXL {importlib.metadata.version('nixl')}"

    def wait(self) -> Seen:
        while not self._agent.get_new_notifs():
            pass
        arrived_s = time.monotonic()
        self._line.say("arrived")
        return Seen(end_s=arrived_s)
