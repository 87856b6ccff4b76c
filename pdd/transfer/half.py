"""What both halves of a messenger share: the port, the arena's place, the events that wait to be taken."""

from __future__ import annotations

import os

import msgspec

from pdd.base.errors import FabricError
from pdd.fabric.port import FabricPort
from pdd.memory.layout import KvLayout
from pdd.transfer.events import TransferEvent


class TransferCounters(msgspec.Struct):
    """Since the start."""

    ignored: int = 0
    """Messages and events that fit no open handoff."""
    contradictions: int = 0
    """Prefillers' claims that their own writes disprove; the handoff stays as it was."""
    strays: int = 0
    """Pieces that nobody expected."""
    busy: int = 0
    """Times that a write had to wait for a free slot of the port."""


class Half:
    def __init__(self, port: FabricPort, layout: KvLayout, arena_address: int, arena_fd: int) -> None:
        self._port = port
        self._layout = layout
        self._arena_address = arena_address
        self._arena_fd = arena_fd
        self._events: list[TransferEvent] = []
        self._port_error = 0
        self.counters = TransferCounters()

    def require_port(self) -> None:
        """Raises FabricError once the port has failed."""
        if self._port_error:
            raise FabricError(f"the fabric port failed: {os.strerror(self._port_error)}", self._port_error)
