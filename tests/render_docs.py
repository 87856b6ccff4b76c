"""Rewrites the parts of docs/ that repeat what the code says: `python tests/render_docs.py`.

A part stands between two markers; everything around them is written by hand and left alone:

    <!-- rendered: NAME -->
    ...
    <!-- end: NAME -->

`--check` changes nothing and fails where a file would change. tests/unit/docs compares in the same way.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect

from pdd import __main__ as pdd_main
from pdd.control import main as pdctl_main
from pdd.daemon import metrics as daemon_metrics
from pdd.http.metrics import HttpMetrics
from pdd.lifecycle import table as lifecycle
from pdd.topology.model import Topology
from pdd.topology.schema import schema

DOCS = Path(__file__).parents[1] / "docs"
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


# ---- metrics ----


def render_metrics() -> str:
    return daemon_metrics.render(daemon_metrics.Metrics())


def render_http_metrics() -> str:
    lines = ["| series | type | labels | what |", "|---|---|---|---|"]
    for metric in vars(HttpMetrics()).values():
        for family in metric.collect() if hasattr(metric, "_labelnames") else ():
            labels = ", ".join(metric._labelnames)
            lines.append(f"| `{family.name}` | {family.type} | {labels} | {family.documentation} |")
    return "\n".join(lines) + "\n"


# ---- topology ----


def render_topology() -> str:
    """One table for each struct, the file's own first, the others in the order in which they are met."""
    structs: dict[str, inspect.StructType] = {}
    waiting = [inspect.type_info(Topology)]
    while waiting:
        found = waiting.pop(0)
        if isinstance(found, inspect.StructType) and found.cls.__name__ not in structs:
            structs[found.cls.__name__] = found
            waiting += [field.type for field in found.fields]
        waiting[:0] = _inner(found)
    return "\n".join(_struct_table(struct) for struct in structs.values())


def _inner(kind: inspect.Type) -> list[inspect.Type]:
    match kind:
        case inspect.UnionType(types=types):
            return list(types)
        case inspect.DictType(value_type=value):
            return [value]
        case inspect.VarTupleType(item_type=item):
            return [item]
        case _:
            return []


def _struct_table(struct: inspect.StructType) -> str:
    name = struct.cls.__name__
    described = schema()["$defs"][name]["properties"]
    title = "The file" if struct.cls is Topology else name
    lines = [f"### {title}", "", "| key | type | default | meaning |", "|---|---|---|---|"]
    for field in struct.fields:
        meaning = described[field.encode_name].get("description", "")
        default = _default(field)
        lines.append(f"| `{field.encode_name}` | {_type(field.type)} | {default} | {_cell(meaning)} |")
    return "\n".join(lines) + "\n"


def _type(kind: inspect.Type) -> str:
    match kind:
        case inspect.UnionType(types=types):
            return " or ".join(_type(it) for it in types if not isinstance(it, inspect.NoneType))
        case inspect.Metadata(extra={"unit": "bytes"}):
            return "size"
        case inspect.Metadata(type=inner):
            return _type(inner)
        case inspect.StructType(cls=cls):
            return f"[{cls.__name__}](#{cls.__name__.lower()})"
        case inspect.DictType(value_type=value):
            return f"name: {_type(value)}"
        case inspect.VarTupleType(item_type=item):
            return f"list of ({_type(item)})" if isinstance(item, inspect.UnionType) else f"list of {_type(item)}"
        case inspect.EnumType(cls=enum):
            return " or ".join(f"`{member.value}`" for member in enum)
        case inspect.LiteralType(values=values):
            return " or ".join(f"`{value}`" for value in values)
        case inspect.BoolType():
            return "`true` or `false`"
        case inspect.IntType(ge=least, le=most):
            return _range("whole number", least, most)
        case inspect.FloatType(gt=above, le=most):
            return f"number, above {above:g}, at most {most:.0f}"
        case inspect.CustomType(cls=cls) if cls is Path:
            return "path"
        case inspect.StrType():
            return "text"
        case _:
            raise NotImplementedError(kind)


def _range(what: str, least: int | None, most: int | None) -> str:
    if least is None:
        return what
    return f"{what}, {least} or more" if most is None else f"{what}, {least} to {most}"


def _default(field: inspect.Field) -> str:
    if field.required:
        return "**required**"
    value: Any = field.default if field.default is not msgspec.NODEFAULT else field.default_factory()
    if value is None or value == ():
        return "none"
    if isinstance(value, msgspec.Struct):
        return "its own defaults"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and _type(field.type) == "size":
        return f"`{_size(value)}`"
    shown = value.value if isinstance(value, Enum) else f"{value:g}" if isinstance(value, float) else value
    return f"`{shown}`"


def _size(num_bytes: int) -> str:
    return next(f"{num_bytes // unit} {name}" for unit, name in _UNITS if num_bytes % unit == 0)


# ---- command lines ----


def render_pdctl() -> str:
    return _command_line(pdctl_main._parser())


def render_pdd() -> str:
    return _command_line(pdd_main._parser())


def _command_line(parser: argparse.ArgumentParser) -> str:
    """All commands below a parser, from its structure: argparse's own help differs between versions of Python."""
    commands = list(_commands(parser))
    names = [{_names(it) for it in _shown(command)} for command, _ in commands]
    shared = {name for name in set().union(*names) if sum(name in of_one for of_one in names) > len(commands) / 2}
    parts = []
    if shared:
        actions = {_names(it): it for command, _ in commands for it in _shown(command) if _names(it) in shared}
        parts = ["Options that most commands have:", "", *_table(list(actions.values())), ""]
    for command, text in commands:
        own = [it for it in _shown(command) if _names(it) not in shared]
        parts += [f"### {command.prog}", "", f"{text[0].upper()}{text[1:]}.", "", "```", _usage(command), "```", ""]
        parts += [*_table(own), ""] if any(_meaning(it) for it in own) else []
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[argparse.ArgumentParser, str]]:
    """Each command that can be run, with its sentence."""
    for action in _sub_parsers(parser):
        helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
        for name, sub in action.choices.items():
            if _sub_parsers(sub):
                yield from _commands(sub)
            else:
                yield sub, helps[name]


def _sub_parsers(parser: argparse.ArgumentParser) -> list[Any]:
    return [it for it in parser._actions if isinstance(it, argparse._SubParsersAction)]


def _shown(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    return [it for it in parser._actions if it.help is not argparse.SUPPRESS and it.dest != "help"]


def _usage(parser: argparse.ArgumentParser) -> str:
    options = [it for it in _shown(parser) if it.option_strings]
    words = [_names(it) if it.required else f"[{_names(it)}]" for it in options]
    return " ".join([parser.prog, *words, *(_names(it) for it in _shown(parser) if not it.option_strings)])


def _table(actions: Sequence[argparse.Action]) -> list[str]:
    rows = [f"| `{_names(it)}` | {_cell(_meaning(it))} |" for it in actions]
    return ["| argument | meaning |", "|---|---|", *rows]


def _names(action: argparse.Action) -> str:
    if not action.option_strings:
        return _placeholder(action)
    return f"{action.option_strings[-1]} {_placeholder(action)}" if action.nargs != 0 else action.option_strings[-1]


def _placeholder(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


def _meaning(action: argparse.Action) -> str:
    told = action.default in (None, argparse.SUPPRESS) or "default" in (action.help or "")
    default = "" if told or action.required else f"default: {action.default}"
    return "; ".join(part for part in (action.help, default) if part)


def _cell(text: str) -> str:
    return text.strip().replace("|", "\\|").replace("<", "&lt;")


# ---- files ----

PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "metrics.md": {"metrics": render_metrics, "http metrics": render_http_metrics},
    "topology.md": {"topology": render_topology},
    "pdctl.md": {"pdctl": render_pdctl, "pdd": render_pdd},
    "states.md": {
        "decode side": lambda: lifecycle.render(lifecycle.DECODE),
        "prefill side": lambda: lifecycle.render(lifecycle.PREFILL),
    },
}


def rendered(text: str, parts: dict[str, Callable[[], str]]) -> str:
    """`text` with its parts as they should be. Raises ValueError where a part's markers are not there exactly once."""
    for name, render in parts.items():
        begin, end = f"<!-- rendered: {name} -->\n", f"<!-- end: {name} -->"
        if text.count(begin) != 1 or text.count(end) != 1 or text.index(end) < text.index(begin):
            raise ValueError(f"the markers of {name!r} must be there once")
        before, _, rest = text.partition(begin)
        after = rest.partition(end)[2]
        text = f"{before}{begin}\n{render().strip()}\n\n{end}{after}"
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Rewrites the rendered parts of docs/.")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a file would change")
    check: bool = parser.parse_args(arguments).check
    num_stale = 0
    for name, parts in PARTS.items():
        path = DOCS / name
        text = path.read_text()
        wanted = rendered(text, parts)
        if text != wanted:
            num_stale += 1
            print(f"{path.relative_to(DOCS.parent)}: {'differs from the code' if check else 'rewritten'}")
            if not check:
                path.write_text(wanted)
    return 1 if check and num_stale else 0


if __name__ == "__main__":
    sys.exit(main())
