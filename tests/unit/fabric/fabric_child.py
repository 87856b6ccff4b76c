"""A second process with a port of its own, told what to do by one JSON line at a time on its standard input."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import sys
from typing import Any

from fabric_bench import open_kind

from pdd.base.ids import Immediate
from pdd.fabric.immediate import NUM_SLOTS, pack
from pdd.fabric.port import CountReached, Memory, Peer, Piece, RegisteredMemory, Token, Write, WriteDone
from pdd.memory.arena import SharedMemory


def immediate(number: int) -> Immediate:
    """Of a write, by its number: any slot is used again after all others."""
    return pack(number % NUM_SLOTS, number // NUM_SLOTS)


class Child:
    def __init__(self, kind: str, arena_bytes: int, fill: int, *hosts: str) -> None:
        self.port = open_kind(kind, hosts=hosts)
        fd = SharedMemory.make_fd("arena", arena_bytes)
        self.map = mmap.mmap(fd, arena_bytes)
        self.map[:] = bytes([fill]) * arena_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.memory: RegisteredMemory = self.port.register(self.address, arena_bytes, fd)

    def hello(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "address": self.memory.address.hex()}

    def connect(self, address: str) -> int:
        return self.port.add_peer(bytes.fromhex(address))

    def drop(self, peer: int) -> None:
        self.port.drop_peer(Peer(peer))

    def write(self, peer: int, num_writes: int, num_pages: int, page_bytes: int, first: int = 0) -> None:
        """`num_writes` writes of pages 0 to `num_pages`, tokens and immediates by number, from `first` on."""
        for number in range(first, first + num_writes):
            write = Write(
                token=Token(number),
                peer=Peer(peer),
                memory=Memory(self.memory.memory),
                immediate=immediate(number),
                num_layers=1,
                source_base=self.address,
                source_layer_bytes=0,
                source_page_bytes=page_bytes,
                target_base=0,
                target_layer_bytes=0,
                target_page_bytes=page_bytes,
                source_pages=tuple(range(num_pages)),
                target_pages=tuple(reversed(range(num_pages))),
                pieces=(Piece(0, 0, page_bytes),),
            )
            self.port.write(write)

    def ends(self, number: int, patience_s: float) -> list[tuple[int, int, int]]:
        """Token, error and pieces of the next `number` ended writes."""
        found: list[WriteDone] = []
        while len(found) < number and select.select([self.port], [], [], patience_s)[0]:
            found += [event for event in self.port.events() if isinstance(event, WriteDone)]
        return [(end.token, end.error, end.num_pieces) for end in found]

    def expect(self, number: int, num_pieces: int) -> None:
        self.port.expect(immediate(number), num_pieces)

    def counted(self, number: int, patience_s: float) -> bool:
        """Waits until the write of that number has arrived whole."""
        while select.select([self.port], [], [], patience_s)[0]:
            if any(isinstance(it, CountReached) and it.immediate == immediate(number) for it in self.port.events()):
                return True
        return False

    def page_is(self, page: int, page_bytes: int, fill: int) -> bool:
        return self.map[page * page_bytes :][:page_bytes].count(fill) == page_bytes

    def nics(self) -> list[dict[str, int]]:
        return [self.port.nic_statistics(nic) for nic in range(self.port.info.num_nics)]

    def statistics(self) -> dict[str, int]:
        return self.port.statistics()

    def way(self, peer: int) -> dict[str, Any]:
        info = self.port.peer_info(Peer(peer))
        return {"copies": info.copies, "num_paths": info.num_paths, "num_open": info.num_open}

    def run(self) -> None:
        print(json.dumps(self.hello()), flush=True)
        for line in sys.stdin:
            call = json.loads(line)
            print(json.dumps(getattr(self, call.pop("call"))(**call)), flush=True)


if __name__ == "__main__":
    Child(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:]).run()
