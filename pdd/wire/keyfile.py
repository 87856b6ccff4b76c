"""The cluster key: one secret file that every daemon of a cluster has, read before the first link is made."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from pdd.base.errors import KeyFileInvalid

MIN_KEY_BYTES = 32
MAX_KEY_BYTES = 4096


def load_key(path: Path) -> bytes:
    """The bytes of the file. Raises KeyFileInvalid when it is missing, no plain file, too short or long, or open to
    others than its owner."""
    try:
        # O_NONBLOCK: a named pipe in its place must not hang the daemon.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise KeyFileInvalid(
            f"cluster key file {path}: {error.strerror}; make one with `head -c 32 /dev/urandom`, mode 0600, "
            "and copy it to every node"
        ) from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise KeyFileInvalid(f"cluster key file {path} is not a regular file")
        mode = stat.S_IMODE(status.st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise KeyFileInvalid(
                f"cluster key file {path} has mode {mode:04o}: others can use it; run `chmod 600 {path}`"
            )
        key = os.read(fd, MAX_KEY_BYTES + 1)
    finally:
        os.close(fd)
    if not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
        size = f"more than {MAX_KEY_BYTES}" if len(key) > MAX_KEY_BYTES else str(len(key))
        raise KeyFileInvalid(f"cluster key file {path} has {size} bytes; {MIN_KEY_BYTES} to {MAX_KEY_BYTES} are needed")
    return key


def ensure_key(path: Path) -> bytes:
    """`load_key`, after making the file where there is none. Two processes that race get the same key.

    The key is written to a file beside it that is then linked into place, so nobody ever reads half of one.
    """
    if not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        try:
            _create(path, draft)
        except OSError as error:
            raise KeyFileInvalid(f"cannot make the cluster key file {path}: {error.strerror}") from error
    return load_key(path)


def _create(path: Path, draft: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(secrets.token_bytes(MIN_KEY_BYTES))
            file.flush()
            os.fsync(fd)
        os.link(draft, path)
    except FileExistsError:
        pass  # the other process was first: its key is the one
    finally:
        draft.unlink(missing_ok=True)
