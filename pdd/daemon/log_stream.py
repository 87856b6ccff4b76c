"""Where log lines go: a stderr that never makes its writer wait and never fails.

A full disk, a pipe that nobody reads or one whose reader is gone must not reach the state machines that say something
in the middle of a turn. Lines wait in memory for a thread of their own, up to a bound; what does not fit, or cannot be
written, is lost, counted, and told of in the place where it is missing, once writing works again.
"""

from __future__ import annotations

import io
import os
import select
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from typing_extensions import Buffer

MAX_WAITING_BYTES = 4 * 1024 * 1024


class LogStream(io.RawIOBase):
    """Writes to `fd` in the order of `write`. `on_loss` hears of each loss as it happens, from any thread."""

    def __init__(self, fd: int, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._fd = fd
        self._max_waiting_bytes = max_waiting_bytes
        self._changed = threading.Condition()
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._dropped = 0
        """Lines that came after those that wait, and found no room."""
        self._unwritten = 0
        """Lines that came before those that wait, and could not be written. The writer's own, like `_torn`."""
        self._torn = False
        """Half a line was written."""
        self._writing = False
        self._lost = 0
        self._on_loss: Callable[[int], object] = lambda _: None
        threading.Thread(target=self._write_for_ever, name="log", daemon=True).start()

    def text(self) -> TextIO:
        """The same for text: whole lines come through at once."""
        return io.TextIOWrapper(
            io.BufferedWriter(self), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )

    def tell_losses(self, on_loss: Callable[[int], object]) -> None:
        """From now on; of earlier ones at once."""
        with self._changed:
            self._on_loss = on_loss
            if self._lost:
                on_loss(self._lost)

    def write(self, data: Buffer, /) -> int:
        lines = bytes(data)
        with self._changed:
            if self._dropped or self._waiting_bytes + len(lines) > self._max_waiting_bytes:
                self._dropped += lines.count(b"\n")
                self._lose(lines.count(b"\n"))
                return len(lines)
            self._waiting.append(lines)
            self._waiting_bytes += len(lines)
            if not self._writing:
                self._changed.notify_all()
        return len(lines)

    def drain(self, within_s: float) -> bool:
        """Waits until all is written or lost; False where that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not (self._writing or self._waiting), within_s)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    # The writer's thread.

    def _write_for_ever(self) -> None:
        while True:
            with self._changed:
                self._writing = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._waiting)
                self._writing = True
                lines, self._waiting, self._waiting_bytes = b"".join(self._waiting), [], 0
                dropped, self._dropped = self._dropped, 0
            self._write(lines, dropped)

    def _write(self, lines: bytes, dropped: int) -> None:
        before = b"\n" * self._torn + _note(self._unwritten)
        begin, end = len(before), len(before) + len(lines)
        data = before + lines + _note(dropped)
        written = self._write_out(data)
        if written:
            self._torn = data[written - 1 : written] != b"\n"
        if written >= begin:
            self._unwritten = 0
        if written < len(data):
            missing = data[max(written, begin) : end].count(b"\n")
            self._unwritten += missing + dropped
            with self._changed:
                self._lose(missing)

    def _write_out(self, data: bytes) -> int:
        """How many bytes were taken before it failed."""
        written = 0
        while written < len(data):
            try:
                written += os.write(self._fd, data[written : written + 64 * 1024])
            except BlockingIOError:  # somebody else who has this file made it so
                poll = select.poll()
                poll.register(self._fd, select.POLLOUT)
                poll.poll()
            except OSError:
                break
        return written

    def _lose(self, num_lines: int) -> None:
        self._lost += num_lines
        self._on_loss(num_lines)


def _note(num_lines: int) -> bytes:
    """In the place of lines that are missing."""
    return f'level=warning event="log lines were lost" lines={num_lines}\n'.encode() if num_lines else b""
