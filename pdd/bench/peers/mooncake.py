"""Mooncake's transfer engine over TCP: whole batches of pages. Its target is not told of arrivals, so a round ends with
the source's completion."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from typing import Any

from mooncake.engine import TransferEngine

from pdd.bench.peers import pair
from pdd.bench.peers.pair import Arena, Line, Round, Seen

HOST = "127.0.0.1"
PAGES_PER_BATCH = 4096
"""More in flight than its queue takes (MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER, at most 8192 in use here) make it fail."""


def _open_engine(protocol: str, arena: Arena) -> Any:
    engine = TransferEngine()
    if engine.initialize(HOST, "P2PHANDSHAKE", protocol, "") or engine.register_memory(arena.address, arena.num_bytes):
        raise RuntimeError(f"Mooncake cannot open {protocol} on {HOST}")
    return engine


def _version() -> str:
    """The wheel comes under several names."""
    names = importlib.metadata.packages_distributions().get("mooncake", [])
    return f"Mooncake {importlib.metadata.version(names[0])}" if names else "Mooncake"


class Source(pair.Source):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)
        self._engine = _open_engine(variant, self.arena)
        port, self._peer_base = line.hear()
        self._peer = f"{HOST}:{port}"
        self._batches: list[tuple[list[int], list[int], list[int]]] = []

    def prepare(self, job: Round, target_pages: Sequence[int]) -> None:
        self._batches = []
        for start in range(0, job.num_pages, PAGES_PER_BATCH):
            there = [self._peer_base + page * job.page_bytes for page in target_pages[start : start + PAGES_PER_BATCH]]
            here = [self.arena.address + (start + i) * job.page_bytes for i in range(len(there))]
            self._batches.append((here, there, [job.page_bytes] * len(there)))

    def write(self) -> None:
        for batch in self._batches:
            if self._engine.batch_transfer_sync_write(self._peer, *batch):
                raise RuntimeError("Mooncake's batch failed")


class Target(pair.Target):
    def __init__(self, variant: str, arena_bytes: int, line: Line) -> None:
        self.arena = Arena(arena_bytes)
        self._engine = _open_engine(variant, self.arena)
        line.say([self._engine.get_rpc_port(), self.arena.address])
        self.version = _version()

    def wait(self) -> Seen:
        return Seen()
