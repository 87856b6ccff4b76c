"""The topology language as JSON Schema, for editors and for programs that write topologies.

Made from the structs alone, the docstrings of their fields included; topology/schema.json is this export, and a test
keeps the two equal (`pdctl topology schema` prints it). Rules between fields are not in it: check.py has them.
"""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import msgspec

from pdd.topology import model


def schema() -> dict[str, Any]:
    """JSON Schema (draft 2020-12) of a topology file."""
    exported = msgspec.json.schema(model.Topology, schema_hook=_path_schema)
    for (struct, field), text in _descriptions().items():
        definition = exported["$defs"].get(struct, {}).get("properties", {}).get(field)
        if definition is not None:
            definition["description"] = text
    for definition in exported["$defs"].values():
        for value in definition.get("properties", {}).values():
            if value.get("pattern") == model.SIZE_PATTERN:
                value["type"] = ["integer", "string"]  # a size is a number to msgspec, and a text as well to load.py
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "pdd topology",
        "description": "Which machines serve which model in which roles.",
        **exported,
    }


def schema_text() -> str:
    """The contents of topology/schema.json."""
    return msgspec.json.format(msgspec.json.encode(schema()), indent=2).decode() + "\n"


def _path_schema(kind: type) -> dict[str, Any]:
    if kind is Path:
        return {"type": "string", "minLength": 1}
    raise NotImplementedError(f"no JSON Schema for {kind}")


def _descriptions() -> dict[tuple[str, str], str]:
    """(struct, field) to the docstring under the field, as one line."""
    found: dict[tuple[str, str], str] = {}
    for struct in ast.parse(inspect.getsource(model)).body:
        if not isinstance(struct, ast.ClassDef):
            continue
        bases = {base.id for base in struct.bases if isinstance(base, ast.Name)}
        found |= {(struct.name, field): text for (owner, field), text in found.items() if owner in bases}
        for statement, following in zip(struct.body, struct.body[1:], strict=False):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(id=field)), ast.Expr(value=ast.Constant(value=str(text))):
                    found[struct.name, field] = " ".join(text.split())
    return found
