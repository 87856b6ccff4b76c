"""A stderr that cannot be written to, or that nobody reads, costs lines and nothing else."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdd.daemon.log_stream import LogStream

PATIENCE_S = 20.0
LOST = 'level=warning event="log lines were lost" lines={}\n'


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


def read_until(fd: int, end: str) -> str:
    text = ""
    while not text.endswith(end):
        text += os.read(fd, 1 << 20).decode()
    return text


def filled(writer: int) -> int:
    """A pipe takes no more after so many bytes."""
    os.set_blocking(writer, False)
    num_bytes = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            num_bytes += os.write(writer, b"x" * 4096)
    return num_bytes


def test_lines_come_out_whole_and_in_order(tmp_path: Path) -> None:
    fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    stream = LogStream(fd)
    text = stream.text()
    for number in range(2000):
        print("line", number, "\N{SNOWMAN}", file=text)
    print("no newline", end="", file=text, flush=True)
    assert stream.drain(PATIENCE_S)
    os.close(fd)
    written = (tmp_path / "log").read_text("utf-8")
    assert written == "".join(f"line {number} \N{SNOWMAN}\n" for number in range(2000)) + "no newline"


@pytest.mark.parametrize("blocking", [True, False])
def test_nobody_waits_for_a_pipe_that_nobody_reads(pipe: tuple[int, int], blocking: bool) -> None:
    reader, writer = pipe
    num_full = filled(writer)
    os.set_blocking(writer, blocking)
    stream = LogStream(writer, max_waiting_bytes=10_000)
    told: list[int] = []
    text = stream.text()
    for number in range(100):
        print(f"{number:04d}" + "." * 4000, file=text)
    stream.tell_losses(told.append)  # what was lost by now comes in one
    print("one more", file=text)
    assert not stream.drain(0.01)
    num_lost = sum(told)
    assert num_lost > 50
    assert len(os.read(reader, num_full)) == num_full
    heard = read_until(reader, LOST.format(num_lost)).splitlines()
    # In the place where they are missing, and those before it all came.
    assert [line[:4] for line in heard[:-1]] == [f"{number:04d}" for number in range(len(heard) - 1)]
    assert len(heard) - 1 + num_lost == 101
    print("and on", file=text)
    assert read_until(reader, "\n") == "and on\n"


def test_lines_that_cannot_be_written_are_told_of_once_they_can(
    monkeypatch: pytest.MonkeyPatch, pipe: tuple[int, int]
) -> None:
    reader, writer = pipe
    real_write, room = os.write, 7

    def write(fd: int, data: bytes) -> int:
        """A disk with room for some bytes."""
        nonlocal room
        if fd != writer:
            return real_write(fd, data)
        if not room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        num_bytes = real_write(fd, data[:room])
        room -= num_bytes
        return num_bytes

    monkeypatch.setattr(os, "write", write)
    stream = LogStream(writer)
    told: list[int] = []
    stream.tell_losses(told.append)
    text = stream.text()
    for line in ("first", "second", "third"):
        print(line, file=text)
        assert stream.drain(PATIENCE_S)
    assert sum(told) == 2
    room = 1_000_000
    print("fourth", file=text)
    assert read_until(reader, "fourth\n") == "first\ns\n" + LOST.format(2) + "fourth\n"


def test_a_reader_that_is_gone_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stream = LogStream(writer)
    told: list[int] = []
    stream.tell_losses(told.append)
    print("hello", file=stream.text())
    assert stream.drain(PATIENCE_S)
    assert told == [1]
    os.close(writer)
