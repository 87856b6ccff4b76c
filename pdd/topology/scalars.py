"""One written word of the topology file to one value, by the type that is wanted there and never by YAML's guess.

YAML 1.1 reads `on` as true, `1:30` as 90 and `010` as 8. Here a field's type decides, and a word that YAML would read
as something else is refused with a sentence that says what to write instead.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from msgspec import inspect
from yaml import ScalarNode

from pdd.topology.model import SIZE_PATTERN

_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]{0,18})")
_NUMBER = re.compile(r"[-+]?([0-9]{1,18}(\.[0-9]{0,18})?|\.[0-9]{1,18})([eE][-+]?[0-9]{1,2})?")
_DURATION = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) *([a-z]+)")
_SECONDS_IN = {
    unit: seconds
    for units, seconds in (
        ("ms", 0.001),
        ("s sec second seconds", 1),
        ("m min minute minutes", 60),
        ("h hour hours", 3600),
    )
    for unit in units.split()
}
_DECIMAL_SIZE = re.compile(r"([0-9.]{1,18}) *([kKmMgGtT])(i?[bB])?")
_TAG = "tag:yaml.org,2002:"


class WrongValueError(Exception):
    """The word does not fit; the text says what would. Never leaves this package."""


def shown(text: str) -> str:
    """A word of the file as a message may show it: short, and without control characters."""
    return repr(text if len(text) <= 40 else text[:37] + "...")


def is_null(node: ScalarNode) -> bool:
    return node.tag == f"{_TAG}null" and node.style is None


def scalar(node: ScalarNode, wanted: inspect.Type, base: Path) -> Any:  # noqa: PLR0911 - one line a type
    """The value of `node` as `wanted`; paths are made absolute from `base`. Raises WrongValueError."""
    if not node.tag.startswith(_TAG):
        raise WrongValueError("tags (`!...`) are not used in a topology")
    match wanted:
        case inspect.Metadata(type=inspect.IntType() as inner, extra={"unit": "bytes"}):
            return _in_range(_size(node), inner)
        case inspect.IntType():
            return _in_range(_integer(node), wanted)
        case inspect.FloatType():
            return _in_range(_number(node), wanted)
        case inspect.BoolType():
            return _boolean(node)
        case inspect.StrType():
            return _text(node)
        case inspect.EnumType(cls=enum):
            return enum(_choice(node, [str(member.value) for member in enum]))
        case inspect.LiteralType(values=values):
            return _choice(node, [str(value) for value in values])
        case inspect.CustomType(cls=cls) if cls is Path:
            return _path(node, base)
        case _:
            raise TypeError(f"a topology word has the type {wanted}, which scalars.py does not read")


def _in_range(value: Any, wanted: inspect.IntType | inspect.FloatType) -> Any:
    if wanted.ge is not None and value < wanted.ge:
        raise WrongValueError(f"{value} is too small: at least {wanted.ge:g}")
    if wanted.gt is not None and value <= wanted.gt:
        raise WrongValueError(f"{value} is too small: more than {wanted.gt:g}")
    if wanted.le is not None and value > wanted.le:
        raise WrongValueError(f"{value} is too large: at most {int(wanted.le)}")
    return value


def _integer(node: ScalarNode) -> int:
    text = node.value
    if node.style is not None:
        raise WrongValueError(f"{shown(text)} is a text: write the whole number without quotes")
    if _INTEGER.fullmatch(text):
        return int(text)
    if is_null(node):
        raise WrongValueError("empty: a whole number is needed")
    raise WrongValueError(f"{shown(text)} is not a whole number in decimal digits ({_as_yaml_reads(text)})")


def _as_yaml_reads(text: str) -> str:
    """What another YAML program would take the word for."""
    try:
        value = yaml.safe_load(text[:40])
    except (yaml.YAMLError, ValueError):
        return "it is a text"
    return "it is a text" if isinstance(value, str) else f"YAML reads it as {str(value).lower()}"


def _number(node: ScalarNode) -> float:
    text = node.value
    if node.style is None and _NUMBER.fullmatch(text) and not re.fullmatch(r"[-+]?0[0-9]+", text):
        return float(text)
    if is_null(node):
        raise WrongValueError("empty: a number of seconds is needed")
    duration = _DURATION.fullmatch(text)
    if duration and duration[2] in _SECONDS_IN:
        seconds = float(duration[1]) * _SECONDS_IN[duration[2]]
        raise WrongValueError(f"{shown(text)} has a unit: the field is in seconds, write {seconds:g}")
    if node.style is not None:
        raise WrongValueError(f"{shown(text)} is a text: write the number without quotes")
    raise WrongValueError(f"{shown(text)} is not a number of seconds")


def _size(node: ScalarNode) -> int:
    text = node.value
    if found := re.fullmatch(SIZE_PATTERN, text):
        return int(found[1]) * _UNITS[found[2]]
    if node.style is None and _INTEGER.fullmatch(text):
        return int(text)
    if is_null(node):
        raise WrongValueError("empty: a size is needed, such as 512 MiB")
    if found := _DECIMAL_SIZE.fullmatch(text):
        letter = found[2].upper()
        unit = f"{letter}iB" if letter in "KMG" else "GiB"
        raise WrongValueError(f"{shown(text)} is not a size that pdd reads: whole KiB, MiB or GiB, such as 512 {unit}")
    raise WrongValueError(f"{shown(text)} is not a size: a number of bytes, or whole KiB, MiB or GiB, such as 512 MiB")


def _boolean(node: ScalarNode) -> bool:
    if node.style is None and node.value in {"true", "false"}:
        return bool(node.value == "true")
    raise WrongValueError(f"{shown(node.value)} is neither true nor false: write one of these words")


def _text(node: ScalarNode) -> str:
    text = str(node.value)
    kind = node.tag.removeprefix(_TAG)
    if is_null(node):
        raise WrongValueError("empty: a text is needed")
    if node.style is None and kind != "str":
        read_as = {"bool": "true or false", "int": "a number", "float": "a number", "timestamp": "a date"}.get(
            kind, kind
        )
        raise WrongValueError(f"YAML reads {shown(text)} as {read_as}: put it into quotes")
    if not text.strip():
        raise WrongValueError("empty: a text is needed")
    if not text.isprintable():
        raise WrongValueError(f"{shown(text)} contains a line break or another control character")
    return text


def _choice(node: ScalarNode, allowed: list[str]) -> str:
    text = str(node.value)
    if text in allowed:
        return text
    choices = " or ".join([", ".join(allowed[:-1]), allowed[-1]] if len(allowed) > 1 else allowed)
    raise WrongValueError("empty: " + choices if is_null(node) else f"{shown(text)} is none of: {choices}")


def _path(node: ScalarNode, base: Path) -> Path:
    text = _text(node)
    try:
        return base / Path(text).expanduser()
    except RuntimeError:
        raise WrongValueError("the home directory of `~` is not known: write the whole path") from None
