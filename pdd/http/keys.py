"""Who may ask: API keys, one a line of a file that only the operator can read."""

from __future__ import annotations

import hashlib
import hmac
import stat
from collections.abc import Iterable
from pathlib import Path

from pdd.base.errors import KeyFileInvalid, Unauthorized


def read_keys(path: Path) -> list[str]:
    """Keys of a file, one at least; empty lines and lines that start with # are none.

    Raises KeyFileInvalid when the file cannot be read, is open to others, or holds no key.
    """
    try:
        mode = path.stat().st_mode
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFileInvalid(f"the API key file {path} cannot be read: {error}") from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise KeyFileInvalid(f"the API key file {path} is open to others (mode {mode & 0o777:04o}): chmod 600 it")
    keys = [key for line in lines if (key := line.strip()) and not key.startswith("#")]
    if not keys:
        raise KeyFileInvalid(f"the API key file {path} holds no key: write one a line")
    return keys


class ApiKeys:
    """Holds digests only, which have one length, so that comparing tells nothing about a key."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def check(self, authorization: str | None) -> None:
        """Raises Unauthorized unless the Authorization header carries one of the keys; takes equal time for all."""
        scheme, _, key = (authorization or "").partition(" ")
        digest = hashlib.sha256(key.strip().encode(errors="surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise Unauthorized("Incorrect or missing API key: send it as `Authorization: Bearer <key>`.")
