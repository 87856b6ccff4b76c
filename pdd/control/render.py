"""Rows and values as an operator wants them: an aligned table, JSON or YAML.

Text in a table comes from daemons and, through them, from clients: what could move a terminal's cursor is replaced.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import yaml


def plain(text: object) -> str:
    """A cell: one line, printable characters only."""
    return "".join(character if character.isprintable() else "?" for character in str(text))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as their widest cell, numbers to the right, None as `-`. Ends without a newline."""
    cells = [[plain("-" if cell is None else cell) for cell in row] for row in rows]
    right = [all(_number(row[i]) for row in rows) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]
    lines = []
    for row in [list(header), *cells]:
        padded = [c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def _number(cell: object) -> bool:
    return cell is None or cell == "" or isinstance(cell, int | float) or str(cell).endswith((" ms", " s", " MiB", "%"))


def as_json(value: object) -> str:
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode()


def as_yaml(value: object) -> str:
    return str(yaml.safe_dump(to_data(value), sort_keys=False)).rstrip("\n")


def to_data(value: object) -> Any:
    """Structs, paths and enums as plain dicts, lists, texts and numbers."""
    return msgspec.to_builtins(value, enc_hook=str)


def duration(seconds: float | None) -> str:
    """A time with the unit that suits it; an unknown one is empty."""
    if seconds is None or not math.isfinite(seconds):
        return ""
    if abs(seconds) < 10:
        return f"{seconds * 1000:.1f} ms" if abs(seconds) < 0.1 else f"{seconds * 1000:.0f} ms"
    if abs(seconds) < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(min(seconds, 1e12)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}d{hours:02}h" if days else f"{hours}h{minutes:02}m" if hours else f"{minutes}m{rest:02}s"


def mebibytes(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.1f} MiB"


def share(part: float | None) -> str:
    return "" if part is None else f"{part * 100:.1f}%"
