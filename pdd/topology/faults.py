"""What is wrong with a topology file, gathered so that an operator sees every fault in one run.

A fault stands at a key path of the file; the reader remembers where each path was written, so that rules between
fields (check.py), which know nothing of YAML, still point at a line and column.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pdd.base.errors import TopologyInvalid

KeyPath = tuple[str | int, ...]
"""Where a value stands, from the top: ("nodes", "decode0", "replicas", 0, "kv_bytes")."""

MAX_LISTED = 100
"""Faults shown at once: a file of another kind would otherwise fill the screen."""


class Place(NamedTuple):
    line: int
    """From 1."""
    column: int
    """From 1, in characters."""


def dotted(path: KeyPath) -> str:
    """The key path as people write it: `nodes.decode0.replicas[0].kv_bytes`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.lstrip(".")


class Faults:
    """The faults of one file, and which of its values cannot be trusted because of them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._faults: list[tuple[Place, str]] = []
        self._untrusted: set[KeyPath] = set()
        self._places: dict[KeyPath, Place] = {}

    def __len__(self) -> int:
        return len(self._faults)

    def saw(self, path: KeyPath, place: Place) -> None:
        """Remember where the value of `path` was written."""
        self._places[path] = place

    def distrust(self, path: KeyPath) -> None:
        """The value at `path` is a stand-in: rules that rely on it, or on anything under it, say nothing."""
        self._untrusted.add(path)

    def trusts(self, path: KeyPath) -> bool:
        return not any(path[:length] in self._untrusted for length in range(len(path) + 1))

    def place(self, path: KeyPath) -> Place:
        """Where `path` was written; for a value that was left to its default, where its parent was."""
        for length in range(len(path), -1, -1):
            if path[:length] in self._places:
                return self._places[path[:length]]
        return Place(1, 1)

    def add(self, place: Place, path: KeyPath, text: str) -> None:
        where = f"{dotted(path)}: " if path else ""
        self._faults.append((place, f"{self._file}:{place.line}:{place.column}: {where}{text}"))

    def error(self) -> TopologyInvalid:
        """All of them in the order of the file, one a line."""
        lines = [line for _, line in sorted(self._faults, key=lambda fault: fault[0])]
        if len(lines) > MAX_LISTED:
            lines = [*lines[:MAX_LISTED], f"{self._file}: and {len(lines) - MAX_LISTED} more faults"]
        return TopologyInvalid("\n".join(lines))
