"""What a fabric must do: the seam between pdd and whatever moves its bytes.

A request's life meets the fabric twice. The decoder calls `expect` before its ticket leaves and gets one
`CountReached` when all pieces have been placed. The prefiller calls `write` once for each chunk, and the fabric posts
layer after layer as the executor's counter passes; each accepted `write` ends in one `WriteDone`, whatever happens.

One port serves one rank, over all of its NICs. Calls are made from one thread (the event loop's) and never block,
`open` and `close` apart. libfabric.py is the real port, loopback.py the one for simulations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NewType, Protocol

import msgspec

from pdd.base.ids import Immediate

Peer = NewType("Peer", int)
"""Handle of a remote endpoint."""
Memory = NewType("Memory", int)
"""Handle of one registration; the same bytes may be registered many times, with a key for each peer."""
Watch = NewType("Watch", int)
"""Handle of a layer counter that writes can be armed on."""
Token = NewType("Token", int)
"""Caller's number for one write; unique among those in flight."""


class ProviderInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was opened, for logs and `pdctl peers`."""

    provider: str
    """libfabric's own name, for example `net` or `tcp;ofi_rxm`."""
    library_version: str
    num_nics: int
    pages_per_write: int
    """Most (local, remote) pairs in one write: rma_iov_limit."""
    max_write_bytes: int
    fences: bool
    """True when `release` surely stops late writes of the peer that used the registration's `address`."""
    copies: bool
    """True when peers of this machine may have their pages copied: it was asked for, and the system lets us."""


class RegisteredMemory(msgspec.Struct, frozen=True):
    memory: Memory
    address: bytes
    """What the peer passes to `add_peer` to write here: for each NIC a key and an endpoint that only this registration
    has, so that `release` can close both. Over TCP a closed key alone still lets the rest of a half-arrived message in.
    """


class CudaMemory(msgspec.Struct, frozen=True):
    """What a region is if not the host's memory."""

    device: int
    """CUDA's number of it."""
    dmabuf_fd: int = -1
    """Of exactly the region, used during the call only; -1: none, then it is registered by its address."""


class PeerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """How a peer is reached at this moment."""

    copies: bool
    """It is on this machine, and its port has agreed to copy from our memory; the NICs rest. The first write asks."""
    num_paths: int
    """Pairs of a NIC of ours and one of the peer's."""
    num_open: int
    """Of those; the others have failed and not worked since, though messages try them now and then."""


class Piece(msgspec.Struct, frozen=True):
    """A contiguous run of bytes inside a (source page, target page) pair."""

    source_offset_bytes: int
    target_offset_bytes: int
    length_bytes: int


class Write(msgspec.Struct, frozen=True, kw_only=True):
    """All layers of one chunk for one peer. For layer l, pair i and piece p it copies `length_bytes` from
    `source_base + l * source_layer_bytes + source_pages[i] * source_page_bytes + source_offset_bytes` (our address) to
    `target_base + l * target_layer_bytes + target_pages[i] * target_page_bytes + target_offset_bytes` (from the begin
    of the peer's registration on).

    Layer l is posted when the watch's counter is at least `counter_base + l + 1`; without a watch all at once.
    Every piece adds one to the target's count for `immediate`, however pieces are joined into writes.
    """

    token: Token
    peer: Peer
    memory: Memory
    immediate: Immediate
    num_layers: int
    source_base: int
    source_layer_bytes: int
    source_page_bytes: int
    target_base: int
    target_layer_bytes: int
    target_page_bytes: int
    source_pages: Sequence[int]
    target_pages: Sequence[int]
    """Both are best an array("I"), which needs no conversion; neither is changed or kept after `FabricPort.write`."""
    pieces: tuple[Piece, ...]
    watch: Watch | None = None
    counter_base: int = 0


class WriteDone(msgspec.Struct, frozen=True):
    """The one end of an accepted write. Its source pages may be reused."""

    token: Token
    error: int
    """0, or a positive errno; ECANCELED only after `cancel`, `drop_peer`, `unwatch`, `release` and `close`."""
    num_pieces: int
    """Pieces that were posted, so that may arrive: all of them when error is 0."""
    num_bytes: int
    first_s: float | None = None
    """time.monotonic() when the first piece was posted; None: none was."""


class CountReached(msgspec.Struct, frozen=True):
    """All expected pieces of an immediate have been placed in memory. Comes once for each `expect`."""

    immediate: Immediate
    first_s: float
    """time.monotonic() of the first and of the last piece's arrival."""
    last_s: float


class StrayWrite(msgspec.Struct, frozen=True):
    """A piece arrived whose immediate nobody expects (late, or not ours). Never counted as progress."""

    immediate: Immediate
    num_pieces: int


class PortFailed(msgspec.Struct, frozen=True):
    """The endpoint is broken for good: nothing will arrive any more. All writes have ended."""

    error: int


Event = WriteDone | CountReached | StrayWrite | PortFailed


class FabricPort(Protocol):
    @property
    def info(self) -> ProviderInfo: ...

    def register(
        self, address: int, length_bytes: int, fd: int = -1, cuda: CudaMemory | None = None
    ) -> RegisteredMemory:
        """Registers memory for local reads and remote writes. `fd`: the memfd that is mapped there from its first byte
        on, so that peers of this machine can read from it; -1: they cannot. `cuda`: it is a GPU's; then only NICs move
        its pages. Raises FabricError, EOPNOTSUPP where the provider has no way to a GPU's memory."""
        ...

    def release(self, memory: Memory) -> None:
        """Closes the registration's keys and endpoints: of a peer that writes to its `address`, nothing is placed
        afterwards, not even the rest of a message (where `info.fences`). Writes that read from this memory are
        cancelled."""
        ...

    def add_peer(self, address: bytes) -> Peer:
        """Raises FabricError when the address is not one of this provider's."""
        ...

    def drop_peer(self, peer: Peer) -> None:
        """Closes the connection and ends every write to it with ECANCELED; the handle is dead afterwards."""
        ...

    def peer_info(self, peer: Peer) -> PeerInfo:
        """Raises FabricError for a handle that is dead."""
        ...

    def watch(self, counter_address: int, wake_fd: int) -> Watch:
        """Lets writes be armed on the u64 at a process address. `wake_fd` is an eventfd that the executor writes
        after each raise; -1: the counter is polled while writes are armed on it. The caller keeps the fd open."""
        ...

    def unwatch(self, watch: Watch) -> None:
        """Ends the writes armed on it with ECANCELED, as far as they are not posted."""
        ...

    def expect(self, immediate: Immediate, num_pieces: int) -> None:
        """Arms the count, until CountReached or `unexpect`; no goal: it is reached at once. Raises FabricError (EEXIST)
        when the immediate's slot is armed already, FabricBusy when too many CountReached wait in `events`."""
        ...

    def arrived(self, immediate: Immediate) -> int:
        """Pieces placed so far; 0 when not expected. Stays after CountReached, until the slot is armed anew."""
        ...

    def change_expected(self, immediate: Immediate, num_pieces: int) -> None:
        """Sets a new goal for an armed immediate: after a cancel, the number of pieces that were really posted.
        CountReached comes when that is or was already reached, but not a second time. Raises FabricError (ENOENT) when
        the immediate is not expected."""
        ...

    def unexpect(self, immediate: Immediate) -> int:
        """Disarms; later pieces are strays. Returns the pieces placed so far."""
        ...

    def write(self, write: Write) -> None:
        """Accepts a write. Raises FabricBusy when no completion slot is free (nothing was accepted)."""
        ...

    def cancel(self, token: Token) -> None:
        """Posts nothing more of that write; its WriteDone follows when what was posted has completed locally.
        Unknown or ended tokens are ignored."""
        ...

    def fileno(self) -> int:
        """Readable while events wait."""
        ...

    def events(self) -> list[Event]:
        """Takes the events that wait, oldest first."""
        ...

    def close(self) -> None:
        """Ends every write (its WriteDone is then still in `events`) and frees the endpoint."""
        ...
