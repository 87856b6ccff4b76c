"""YAML nodes to the structs of model.py, guided by the structs' types, with every fault gathered on the way.

The walk never stops at a fault: a value that cannot be read gets a stand-in, its path is distrusted, and reading goes
on, so that one run names everything. The types are finite, so neither a recursive alias nor deep nesting can lead it
astray; MAX_VALUES bounds what aliases can multiply.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect
from yaml import MappingNode, Node, ScalarNode, SequenceNode

from pdd.topology.faults import Faults, KeyPath, Place
from pdd.topology.scalars import WrongValueError, is_null, scalar, shown

MAX_VALUES = 20_000
"""Values that one file may hold, aliases counted each time."""


class TooManyValuesError(Exception):
    """The aliases of the file multiply into more than MAX_VALUES values."""


class Reader:
    """One pass over one file."""

    def __init__(self, faults: Faults, base: Path) -> None:
        self._faults = faults
        self._base = base
        self._num_values = 0

    def value(self, node: Node, wanted: inspect.Type, path: KeyPath) -> Any:  # noqa: PLR0911 - one case a kind of type
        """`node` as `wanted`; a stand-in where it cannot be. Raises TooManyValuesError."""
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise TooManyValuesError
        self._faults.saw(path, place_of(node))
        match wanted:
            case inspect.UnionType():
                if isinstance(node, ScalarNode) and is_null(node) and wanted.includes_none:
                    return None
                return self.value(node, _member(wanted, node), path)
            case inspect.StructType() if isinstance(node, MappingNode):
                return self._struct(node, wanted, path)
            case inspect.DictType() if isinstance(node, MappingNode):
                pairs = self._pairs(node, path)
                return {key: self.value(value, wanted.value_type, (*path, key)) for key, _, value in pairs}
            case inspect.VarTupleType() if isinstance(node, SequenceNode):
                return tuple(self.value(n, wanted.item_type, (*path, i)) for i, n in enumerate(node.value))
            case inspect.StructType() | inspect.DictType() | inspect.VarTupleType():
                return self._stand_in(node, wanted, path, f"{_needs(wanted)}, not {_kind(node)}")
            case _ if isinstance(node, ScalarNode):
                try:
                    return scalar(node, wanted, self._base)
                except WrongValueError as error:
                    return self._stand_in(node, wanted, path, str(error))
            case _:
                return self._stand_in(node, wanted, path, f"needs one value, not {_kind(node)}")

    def _struct(self, node: MappingNode, wanted: inspect.StructType, path: KeyPath) -> Any:
        fields = {field.name: field for field in wanted.fields}
        values: dict[str, Any] = {}
        absent = set(fields)
        guesses: set[str] = set()
        for key, key_node, value_node in self._pairs(node, path):
            if key in fields:
                values[key] = self.value(value_node, fields[key].type, (*path, key))
                absent.discard(key)
            else:
                guesses.add(self._unknown_key(key, key_node, list(fields), path))
        for name in absent:
            if name in guesses:
                self._faults.distrust((*path, name))
            if fields[name].required:
                values[name] = stand_in(fields[name].type)
                self._faults.distrust((*path, name))
                if name not in guesses:
                    self._faults.add(place_of(node), (*path, name), "missing")
        return wanted.cls(**values)

    def _unknown_key(self, key: str, node: Node, known: list[str], path: KeyPath) -> str:
        """Report the key; returns the field that was probably meant, or an empty text."""
        close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
        advice = f"did you mean {close[0]}?" if close else "known here: " + ", ".join(known)
        self._faults.add(place_of(node), (*path, key if len(key) <= 40 else shown(key)), f"unknown key; {advice}")
        return close[0] if close else ""

    def _pairs(self, node: MappingNode, path: KeyPath) -> Iterator[tuple[str, Node, Node]]:
        """(key, its node, its value's node), each key once; faults of keys are reported on the way."""
        first: dict[str, Place] = {}
        for key_node, value_node in node.value:
            place = place_of(key_node)
            if not isinstance(key_node, ScalarNode) or not key_node.value.isprintable() or not key_node.value:
                self._faults.add(place, path, "a key must be one plain word")
            elif key_node.style is None and key_node.tag == "tag:yaml.org,2002:merge":
                self._faults.add(place, path, "merge keys (`<<`) are not used in a topology: write the keys out")
            elif key_node.style is None and key_node.tag != "tag:yaml.org,2002:str":
                text = shown(key_node.value)
                self._faults.add(place, path, f"YAML does not read the key {text} as a text: put it into quotes")
            elif key_node.value in first:
                line, column = first[key_node.value]
                text = f"duplicate key; first at line {line}, column {column}"
                self._faults.add(place, (*path, key_node.value), text)
            else:
                first[key_node.value] = place
                yield key_node.value, key_node, value_node

    def _stand_in(self, node: Node, wanted: inspect.Type, path: KeyPath, text: str) -> Any:
        self._faults.add(place_of(node), path, text)
        self._faults.distrust(path)
        return stand_in(wanted)


def place_of(node: Node) -> Place:
    return Place(node.start_mark.line + 1, node.start_mark.column + 1)


def stand_in(wanted: inspect.Type) -> Any:  # noqa: PLR0911 - one case a kind of type
    """Some value of the type, so that reading can go on; a file that needed one is refused in the end."""
    match wanted:
        case inspect.StructType(cls=cls, fields=fields):
            return cls(**{field.name: stand_in(field.type) for field in fields if field.required})
        case inspect.DictType():
            return {}
        case inspect.VarTupleType():
            return ()
        case inspect.EnumType(cls=enum):
            return next(iter(enum))
        case inspect.LiteralType(values=values):
            return values[0]
        case inspect.UnionType(types=types):
            return None if wanted.includes_none else stand_in(types[0])
        case inspect.StrType():
            return ""
        case inspect.CustomType(cls=cls) if cls is Path:
            return Path()
        case _:
            return 0


def _member(wanted: inspect.UnionType, node: Node) -> inspect.Type:
    """What of a union a node can only mean: its list, or what it has beside."""
    members = [member for member in wanted.types if not isinstance(member, inspect.NoneType)]
    wants_list = isinstance(node, SequenceNode)
    fitting = (member for member in members if isinstance(member, inspect.VarTupleType) == wants_list)
    return next(fitting, members[0])


def _needs(wanted: inspect.Type) -> str:
    if isinstance(wanted, inspect.VarTupleType):
        return "needs a list (`- item` a line, or [a, b])"
    if isinstance(wanted, inspect.StructType):
        return "needs keys of its own: " + ", ".join(field.name for field in wanted.fields)
    return "needs keys of its own (`name:` a line)"


def _kind(node: Node) -> str:
    if isinstance(node, MappingNode):
        return "a mapping"
    if isinstance(node, SequenceNode):
        return "a list"
    return "nothing" if isinstance(node, ScalarNode) and is_null(node) else "a single value"


def topology_type(struct: type[msgspec.Struct]) -> inspect.Type:
    """The type tree that `Reader.value` walks by."""
    return inspect.type_info(struct)
