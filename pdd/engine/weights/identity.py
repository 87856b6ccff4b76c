"""Which model some files are: a digest that is equal on every machine that holds the same files.

Hashing a gigabyte takes a second or two, so the cache remembers each source's digest with the size and times of its
files; a source whose files look as they did then is not read again.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from pdd.engine.weights.cache import replace_file

WHOLE_BYTES = 1_000_000_000
"""Files up to this size are hashed as a whole, larger ones as their size, their first bytes and evenly spaced samples:
that tells models, quantisations and cut files apart, but not a single flipped bit."""
_HEAD_BYTES = 16 * 1024 * 1024
_BLOCK_BYTES = 1024 * 1024
_NUM_SAMPLES = 64

Report = Callable[[float], None]
"""Called with the fraction that is done, 0 to 1."""


class Stamp(msgspec.Struct, frozen=True, array_like=True):
    """What a file looks like from outside."""

    name: str
    size: int
    modified_ns: int
    changed_ns: int


class _Known(msgspec.Struct, frozen=True):
    format_version: int
    stamps: tuple[Stamp, ...]
    digest: str


def stamps(paths: list[Path]) -> tuple[Stamp, ...]:
    """Raises OSError where a file is gone."""
    states = [(path.name, path.stat()) for path in paths]
    return tuple(Stamp(name, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for name, state in states)


def known_digest(source: Path, seen: tuple[Stamp, ...], format_version: int, cache: Path) -> str | None:
    """The digest that was remembered of `source` when its files looked as `seen`; None where there is none."""
    try:
        known = msgspec.json.decode(_index(source, cache).read_bytes(), type=_Known)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None  # absent or damaged: worth no more than the time to hash again
    return known.digest if (known.format_version, known.stamps) == (format_version, seen) else None


def remember_digest(source: Path, seen: tuple[Stamp, ...], format_version: int, cache: Path, digest: str) -> None:
    """Only saves time, so a cache that cannot be written is no error here."""
    index = _index(source, cache)
    with suppress(OSError):
        index.parent.mkdir(parents=True, exist_ok=True)
        replace_file(index, msgspec.json.encode(_Known(format_version, seen, digest)))


def content_digest(paths: list[Path], format_version: int, report: Report) -> str:
    """Over the files of a source (a single file's name does not count) and the pack's format: 32 hexadecimal digits.
    Raises OSError."""
    total = hashlib.sha256(f"pdd pack {format_version}\n".encode())
    all_bytes = sum(path.stat().st_size for path in paths) or 1
    done_bytes = 0
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        content = hashlib.sha256(f"{size}\n".encode())
        for end, block in _blocks(path, size):
            content.update(block)
            report((done_bytes + end) / all_bytes)
        done_bytes += size
        name = path.name if len(paths) > 1 else ""
        total.update(f"{name}\n{content.hexdigest()}\n".encode())
    return total.hexdigest()[:32]


def _blocks(path: Path, size: int) -> Iterator[tuple[int, bytes]]:
    """The blocks of a file that count for its digest, each with its end's offset."""
    offsets: Sequence[int]
    if size <= WHOLE_BYTES:
        offsets = range(0, size, _BLOCK_BYTES)
    else:
        last = size - _BLOCK_BYTES
        samples = {last * index // _NUM_SAMPLES for index in range(1, _NUM_SAMPLES + 1)}
        offsets = sorted({*range(0, _HEAD_BYTES, _BLOCK_BYTES), *samples})
    with path.open("rb") as file:
        for offset in offsets:
            file.seek(offset)
            yield min(offset + _BLOCK_BYTES, size), file.read(_BLOCK_BYTES)


def _index(source: Path, cache: Path) -> Path:
    return cache / "sources" / f"{hashlib.sha256(os.fsencode(source)).hexdigest()[:32]}.json"
