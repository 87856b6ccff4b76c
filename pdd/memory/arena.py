"""The shared memory between an executor and its daemon: the arena, the layer counter and the wake-up.

The executor makes all three and passes their descriptors up; the daemon maps them, registers the arena with the
fabric, and hands counter and wake-up to the C library, which sends a layer's pages as soon as the counter says so.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import threading
from contextlib import suppress

from pdd.base.errors import InvariantBroken, OperatorError
from pdd.memory.layout import KvLayout

# linux/fcntl.h; Python names them from 3.12 on.
_F_ADD_SEALS, _F_GET_SEALS = 1033, 1034
_SEAL_SEAL, _SEAL_SHRINK, _SEAL_GROW = 1, 2, 4

COUNTER_BYTES = mmap.PAGESIZE


class SharedMemory:
    """A memfd and its mapping. Owns the descriptor; `close` gives both back."""

    def __init__(self, fd: int, num_bytes: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        try:
            self._map = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(fd)
            raise OperatorError(f"cannot map {num_bytes} bytes of shared memory: {error.strerror}") from error
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))

    @staticmethod
    def make_fd(name: str, num_bytes: int) -> int:
        """A memfd of that size, sealed: a peer that could shrink it would turn our reads into SIGBUS."""
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, num_bytes)
            fcntl.fcntl(fd, _F_ADD_SEALS, _SEAL_SHRINK | _SEAL_GROW | _SEAL_SEAL)
        except OSError as error:
            os.close(fd)
            raise OperatorError(f"cannot make {name}, {num_bytes} bytes of shared memory: {error.strerror}") from error
        return fd

    @staticmethod
    def check_fd(fd: int, what: str, num_bytes: int) -> None:
        """Raises InvariantBroken unless `fd` is a memfd of exactly that size that can never shrink."""
        size = os.fstat(fd).st_size
        if size != num_bytes:
            raise InvariantBroken(f"the {what} from the executor has {size} bytes, its layout says {num_bytes}")
        try:
            seals = fcntl.fcntl(fd, _F_GET_SEALS)
        except OSError as error:
            raise InvariantBroken(f"the {what} from the executor is no memfd: {error.strerror}") from error
        if not seals & _SEAL_SHRINK:
            raise InvariantBroken(f"the {what} from the executor is not sealed against shrinking")

    def buffer(self) -> memoryview:
        """The bytes, writable. Release every view of it before `close`."""
        return memoryview(self._map)

    def close(self) -> None:
        """Unmap and close; safe to call twice. Raises BufferError while a view of the bytes is alive."""
        self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class Arena(SharedMemory):
    """The KV memory of one rank: `layout.arena_bytes` bytes at `address`, zero until first written."""

    def __init__(self, fd: int, layout: KvLayout) -> None:
        super().__init__(fd, layout.arena_bytes)
        self.layout = layout

    @classmethod
    def create(cls, layout: KvLayout) -> Arena:
        """In the executor. No memory is taken before it is touched. Raises OperatorError when the system refuses."""
        arena = cls(cls.make_fd("pdd-arena", layout.arena_bytes), layout)
        with suppress(OSError):  # a kernel that has no huge pages for shared memory serves small ones
            arena._map.madvise(mmap.MADV_HUGEPAGE)
        return arena

    @classmethod
    def map(cls, fd: int, layout: KvLayout) -> Arena:
        """In the daemon: the executor's arena. Takes over `fd`. Raises InvariantBroken if it does not fit `layout`."""
        cls.check_fd(fd, "arena", layout.arena_bytes)
        return cls(fd, layout)


class LayerCounter(SharedMemory):
    """A u64 at `address`: layers whose KV is in place, since the executor's start. It only grows."""

    def __init__(self, fd: int) -> None:
        super().__init__(fd, COUNTER_BYTES)
        self._fence = threading.Lock()
        self._value = 0

    @classmethod
    def create(cls) -> LayerCounter:
        return cls(cls.make_fd("pdd-layers", COUNTER_BYTES))

    @classmethod
    def map(cls, fd: int) -> LayerCounter:
        """Takes over `fd`. Raises InvariantBroken if it is not a counter."""
        cls.check_fd(fd, "layer counter", COUNTER_BYTES)
        return cls(fd)

    def read(self) -> int:
        return ctypes.c_uint64.from_address(self.address).value

    def add(self, num_layers: int) -> int:
        """Publish that the KV of the next `num_layers` layers is stored (release order); the executor only.

        x86 keeps stores in order. Elsewhere the unlock-then-lock of one mutex orders all that came before against
        all that comes after, which is the fence that Python itself does not offer. The store is one aligned u64.
        """
        with self._fence:
            pass
        with self._fence:
            self._value += num_layers
            ctypes.c_uint64.from_address(self.address).value = self._value
        return self._value


class WakeFd:
    """An eventfd: written after each raise of the counter, so that nobody needs to poll the counter."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def create(cls) -> WakeFd:
        return cls(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))

    def notify(self) -> None:
        with suppress(BlockingIOError):  # full: the reader has 2**64 - 2 wake-ups to see already
            os.eventfd_write(self.fd, 1)

    def drain(self) -> int:
        """Wake-ups since the last drain; 0 if none."""
        try:
            return os.eventfd_read(self.fd)
        except BlockingIOError:
            return 0

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
