"""What is made of files (certificates) and made again when they have changed: looked at before each new connection."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import structlog

from pdd.base.errors import CertificateInvalid

log = structlog.get_logger(__name__)

T = TypeVar("T")
_Stamp = tuple[tuple[int, ...] | None, ...]


class Renewed(Generic[T]):
    """`make` raises CertificateInvalid. Once there is a first, one that is no good leaves the one before in place: who
    renews certificates replaces one file after the other."""

    def __init__(self, files: tuple[Path, ...], make: Callable[[], T]) -> None:
        self._files = files
        self._make = make
        self._stamp = self._look()
        self._made = make()

    def current(self) -> T:
        stamp = self._look()
        if stamp == self._stamp:
            return self._made
        self._stamp = stamp  # of before they are read: what changes meanwhile is seen the next time
        names = ", ".join(map(str, self._files))
        try:
            self._made = self._make()
        except (CertificateInvalid, OSError) as error:
            log.error("changed certificates are no good; the earlier ones stay in use", files=names, error=str(error))
        else:
            log.info("certificates read again", files=names)
        return self._made

    def _look(self) -> _Stamp:
        return tuple(_stamp(path) for path in self._files)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What differs when a file was replaced, written or given another mode; None where it is missing."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns
