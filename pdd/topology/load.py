"""Before any request: the topology file to frozen structs, or one error that lists everything that is wrong with it.

Bytes -> text (UTF-8) -> YAML nodes -> structs (read.py) -> rules between fields (check.py). YAML is only composed into
nodes with their places; its own constructors never run, so no word of the file becomes an object by itself.
"""

from __future__ import annotations

from pathlib import Path

import yaml

from pdd.base.errors import TopologyInvalid
from pdd.topology.check import problems
from pdd.topology.faults import Faults, Place
from pdd.topology.model import Topology
from pdd.topology.read import Reader, TooManyValuesError, topology_type

MAX_FILE_BYTES = 256 * 1024
"""A topology of hundreds of nodes is smaller; a wrong file (a model, a log) is not read whole."""


def load(path: Path) -> Topology:
    """Read and check a topology file.

    Relative paths in the file are resolved against its directory. Raises TopologyInvalid, whose text has one line
    for each fault: `file:line:column: key.path: what is wrong and what to write`.
    """
    faults = Faults(path)
    root = _compose(_text(path), faults)
    if root is None or len(faults):
        raise faults.error()
    reader = Reader(faults, path.absolute().parent)
    try:
        topology: Topology = reader.value(root, topology_type(Topology), ())
    except TooManyValuesError:
        faults.add(Place(1, 1), (), "the file's aliases multiply into too many values: write them out")
        raise faults.error() from None
    for problem in problems(topology):
        if all(faults.trusts(key_path) for key_path in (problem.at, *problem.other, *problem.relies_on)):
            lines = ", ".join(str(faults.place(key_path).line) for key_path in problem.other)
            faults.add(faults.place(problem.at), problem.at, problem.text + (f" (line {lines})" if lines else ""))
    if len(faults):
        raise faults.error()
    return topology


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except IsADirectoryError:
        raise TopologyInvalid(f"{path}: is a directory: name the topology file in it") from None
    except FileNotFoundError:
        raise TopologyInvalid(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise TopologyInvalid(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(raw) > MAX_FILE_BYTES:
        raise TopologyInvalid(f"{path}: larger than {MAX_FILE_BYTES // 1024} KiB: this is no topology file")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        column = error.start - (raw.rfind(b"\n", 0, error.start) + 1) + 1
        raise TopologyInvalid(f"{path}:{line}:{column}: not UTF-8 from this byte on") from None


def _compose(text: str, faults: Faults) -> yaml.Node | None:
    """The document's node tree; None (and a fault) where the text is not one YAML document."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(mark.line + 1, mark.column + 1) if mark else Place(1, 1)
        faults.add(place, (), _syntax(error))
        return None
    except yaml.reader.ReaderError as error:
        line, column = text.count("\n", 0, error.position) + 1, error.position - text.rfind("\n", 0, error.position)
        faults.add(Place(line, column), (), "a control character that YAML does not allow")
        return None
    except RecursionError:
        faults.add(Place(1, 1), (), "nested too deeply for a topology")
        return None
    if root is None:
        faults.add(Place(1, 1), (), "the file is empty: see topology/local.yaml for an example")
    return root


def _syntax(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "not YAML"
    if "'\\t'" in problem:
        return "a tab: YAML wants spaces here"
    if "single document" in (error.context or ""):
        return "a second document (`---`): a topology file holds one"
    return f"not YAML: {problem}" + (f" ({error.context})" if error.context else "")
