"""The KV messenger of one rank: its part of every handoff that its rank's replica set sends or receives. See group.py.

    decode rank                                         prefill ranks
      grant     a key for this peer alone  ---------->    connect
      arm       the count                  ---------->    open
      .                                                   send       each chunk, before it runs
      .         <========= pages, layer by layer ====     .
      Arrived   the count is complete                     Sent       pages may be reused

    and where it goes wrong
      stopped   <-------- number of pieces posted ---     stop -> Stopped
      Drained   all of those were counted
      revoke -> Drained (fenced)                          drop, disconnect -> Stopped

A port's part ends in exactly one of Sent and Stopped at a source, and of Arrived and Drained at a target. Sans-I/O
above the fabric port: calls never block and never call back. Events that a call brings about are in the next `poll`, so
poll after calls too. A message that fits no open handoff (late, doubled, unknown) changes nothing and is counted.
"""

from __future__ import annotations

import os

from pdd.fabric.port import CountReached, Event, FabricPort, PortFailed, ProviderInfo, StrayWrite, Watch, WriteDone
from pdd.memory.layout import KvLayout
from pdd.transfer.events import PortBroken, Stray, TransferEvent
from pdd.transfer.receiving import Receiving
from pdd.transfer.sending import Sending


class Messenger(Receiving, Sending):
    """`arena_address`: where the arena of `layout` is in this process; `arena_fd`: its memfd, or -1. `watch`: the layer
    counter of the replica set's lead executor; only prefillers have one."""

    def __init__(
        self, port: FabricPort, layout: KvLayout, arena_address: int, watch: Watch | None = None, *, arena_fd: int = -1
    ) -> None:
        super().__init__(port, layout, arena_address, arena_fd)
        self._watch = watch

    @property
    def info(self) -> ProviderInfo:
        return self._port.info

    def fileno(self) -> int:
        """Readable while the fabric has events."""
        return self._port.fileno()

    def poll(self) -> list[TransferEvent]:
        """What has happened since the last poll, oldest first."""
        for event in self._port.events():
            self._take(event)
        self._submit()
        events, self._events = self._events, []
        return events

    def close(self) -> None:
        """Ends all handoffs and the port. A last poll afterwards tells how they ended."""
        self._stop_all("the replica closes its fabric port")
        self._drain_all()
        self._port.close()
        for event in self._port.events():
            self._take(event)

    def check(self) -> list[str]:
        """What contradicts itself: empty in a healthy messenger."""
        return self._check_targets() + self._check_sources()

    def _take(self, event: Event) -> None:
        match event:
            case CountReached():
                self._count_reached(event)
            case WriteDone():
                self._write_done(event)
            case StrayWrite():
                self.counters.strays += event.num_pieces
                self._events.append(Stray(event.num_pieces))
            case PortFailed():
                self._port_error = event.error
                self._stop_all(f"the fabric port failed: {os.strerror(event.error)}")
                self._revoke_all()  # a NIC may still place what is under way
                self._events.append(PortBroken(event.error))
