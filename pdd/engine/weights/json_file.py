"""Reading a JSON file of a checkpoint into a struct of the fields that matter."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from pdd.base.errors import ModelInvalid

T = TypeVar("T")


def read_json(path: Path, kind: type[T], advice: str = "fetch the model again") -> T:
    """Raises ModelInvalid where the file is absent, no JSON, or lacks a field (the message names it)."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError as error:
        raise ModelInvalid(f"{path} is missing; {advice}") from error
    except OSError as error:
        raise ModelInvalid(f"{path}: {error.strerror}; {advice}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelInvalid(f"{path}: {error}; {advice}") from error


def read_optional_json(path: Path, kind: type[T]) -> T:
    """Like `read_json`; an absent file counts as an empty object."""
    return read_json(path, kind) if path.exists() else msgspec.json.decode(b"{}", type=kind)
