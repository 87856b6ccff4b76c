"""A port that does what the test says."""

from __future__ import annotations

import errno

from pdd.base.errors import FabricBusy, FabricError
from pdd.base.ids import Immediate
from pdd.fabric.port import (
    CountReached,
    Event,
    Memory,
    Peer,
    PeerInfo,
    ProviderInfo,
    RegisteredMemory,
    Token,
    Watch,
    Write,
    WriteDone,
)


class ScriptedPort:
    """Writes down what is asked of it; events are what the test puts into `script`."""

    def __init__(self, *, fences: bool = True) -> None:
        self.script: list[Event] = []
        self.writes: list[Write] = []
        self.cancelled: list[Token] = []
        self.peers: dict[Peer, bytes] = {}
        """Those that were added and not dropped, with their addresses."""
        self.dropped: list[Peer] = []
        self.registered: list[tuple[int, int, int]] = []
        """(address, length, fd) of each."""
        self.released: list[Memory] = []
        self.expected: dict[Immediate, int] = {}
        self.placed: dict[Immediate, int] = {}
        self.busy = False
        self.write_error: FabricError | None = None
        self.release_error: FabricError | None = None
        self.num_handles = 0
        self.closed = False
        self._fences = fences

    @property
    def info(self) -> ProviderInfo:
        return ProviderInfo(
            provider="scripted",
            library_version="0",
            num_nics=1,
            pages_per_write=1,
            max_write_bytes=1,
            fences=self._fences,
            copies=False,
        )

    def _handle(self) -> int:
        self.num_handles += 1
        return self.num_handles

    def register(self, address: int, length_bytes: int, fd: int = -1) -> RegisteredMemory:
        number = self._handle()
        self.registered.append((address, length_bytes, fd))
        return RegisteredMemory(Memory(number), b"endpoint %d" % number)

    def release(self, memory: Memory) -> None:
        if self.release_error is not None:
            raise self.release_error
        self.released.append(memory)

    def add_peer(self, address: bytes) -> Peer:
        peer = Peer(self._handle())
        self.peers[peer] = address
        return peer

    def drop_peer(self, peer: Peer) -> None:
        del self.peers[peer]
        self.dropped.append(peer)

    def peer_info(self, peer: Peer) -> PeerInfo:
        return PeerInfo(copies=self.peers[peer].startswith(b"here"), num_paths=4, num_open=3)

    def watch(self, counter_address: int, wake_fd: int) -> Watch:
        return Watch(self._handle())

    def unwatch(self, watch: Watch) -> None: ...

    def expect(self, immediate: Immediate, num_pieces: int) -> None:
        assert immediate not in self.expected
        self.expected[immediate] = num_pieces
        if not num_pieces:
            self.reach(immediate)

    def arrived(self, immediate: Immediate) -> int:
        return self.placed.get(immediate, 0)

    def change_expected(self, immediate: Immediate, num_pieces: int) -> None:
        if immediate not in self.expected:
            raise FabricError("not expected", errno.ENOENT)
        self.expected[immediate] = num_pieces

    def unexpect(self, immediate: Immediate) -> int:
        self.expected.pop(immediate, None)
        return self.placed.pop(immediate, 0)

    def write(self, write: Write) -> None:
        if self.busy:
            raise FabricBusy("no slot", errno.EAGAIN)
        if self.write_error is not None:
            raise self.write_error
        self.writes.append(write)

    def cancel(self, token: Token) -> None:
        self.cancelled.append(token)

    def fileno(self) -> int:
        return 0

    def events(self) -> list[Event]:
        events, self.script = self.script, []
        return events

    def close(self) -> None:
        self.closed = True

    # For tests.

    def done(self, index: int, error: int = 0, num_pieces: int | None = None) -> None:
        write = self.writes[index]
        full = write.num_layers * len(write.source_pages) * len(write.pieces)
        pieces = full if num_pieces is None else num_pieces
        self.script.append(WriteDone(write.token, error, pieces, pieces * write.pieces[0].length_bytes))

    def reach(self, immediate: Immediate, first_s: float = 1.0, last_s: float = 2.0) -> None:
        self.placed[immediate] = self.expected[immediate]
        self.script.append(CountReached(immediate, first_s, last_s))
