"""The cache directory that all processes of a machine share: files appear whole or not at all, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pdd.base.errors import OperatorError

_TEMPORARY = ".tmp"


def default_cache() -> Path:
    """`$PDD_CACHE`, or `~/.cache/pdd`."""
    named = os.environ.get("PDD_CACHE")
    return Path(named).expanduser() if named else Path.home() / ".cache" / "pdd"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, which takes its place, on the disk, when the block ends well and is removed when
    it does not. Raises OSError."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{_TEMPORARY}")
    temporary.unlink(missing_ok=True)
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def replace_file(path: Path, data: bytes) -> None:
    """Raises OSError."""
    with replacing(path) as temporary, temporary.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def remove_leftovers(directory: Path) -> None:
    """What a killed writer left; only for the one who holds the directory's lock."""
    for path in directory.glob(f".*{_TEMPORARY}"):
        path.unlink(missing_ok=True)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; calls `waiting` once where another process has it. The kernel frees it where its
    holder dies. Raises OSError."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def explained(cache: Path) -> Iterator[None]:
    """Turns an OSError into an OperatorError that says what to do about the cache."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        advice = "make room there, or" if full else "make it writable, or"
        raise OperatorError(
            f"the cache {cache} cannot be written: {error.strerror or error}; {advice} name another directory in "
            f"PDD_CACHE"
        ) from error
