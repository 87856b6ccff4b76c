"""Parts of docs/ that repeat the code are what the code says, on every version of Python."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def render_docs() -> ModuleType:
    path = ROOT / "tests" / "render_docs.py"
    spec = importlib.util.spec_from_file_location("render_docs", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["render_docs"] = module
    spec.loader.exec_module(module)
    return module


def test_rendered_parts_are_up_to_date(render_docs: ModuleType) -> None:
    for name, parts in render_docs.PARTS.items():
        text = (ROOT / "docs" / name).read_text()
        assert render_docs.rendered(text, parts) == text, f"docs/{name}: run python tests/render_docs.py"


def test_a_stale_part_is_rewritten_and_the_rest_is_not(render_docs: ModuleType) -> None:
    text = "before\n<!-- rendered: one -->\nold\n<!-- end: one -->\nafter\n"
    new = render_docs.rendered(text, {"one": lambda: "new\n"})
    assert new == "before\n<!-- rendered: one -->\n\nnew\n\n<!-- end: one -->\nafter\n"
    assert render_docs.rendered(new, {"one": lambda: "new\n"}) == new


@pytest.mark.parametrize("text", ["", "<!-- rendered: one -->\n", "<!-- end: one --> <!-- rendered: one -->\n"])
def test_missing_markers_are_an_error(render_docs: ModuleType, text: str) -> None:
    with pytest.raises(ValueError, match="one"):
        render_docs.rendered(text, {"one": lambda: "new"})


def test_rendering_does_not_depend_on_the_terminal(render_docs: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    before = render_docs.render_pdctl()
    monkeypatch.setenv("COLUMNS", "20")
    assert render_docs.render_pdctl() == before


def test_a_command_line_is_rendered_with_its_options(render_docs: ModuleType) -> None:
    parser = argparse.ArgumentParser(prog="tool")
    commands = parser.add_subparsers()
    for name in ("one", "two"):
        sub = commands.add_parser(name, help=f"does {name}")
        sub.add_argument("--size", type=int, default=4, help="how many | at most")
    sub.add_argument("where", help="a <place>")
    text = render_docs._command_line(parser)
    assert text.count("| `--size SIZE` | how many \\| at most; default: 4 |") == 1, "shared by both, so told once"
    assert "```\ntool two [--size SIZE] WHERE\n```" in text
    assert "| `WHERE` | a &lt;place> |" in text


def test_every_key_of_a_topology_has_a_meaning_or_keys_of_its_own(render_docs: ModuleType) -> None:
    rows = [line for line in render_docs.render_topology().splitlines() if line.startswith("| `")]
    assert len(rows) > 30
    silent = [row for row in rows if row.endswith("|  |") and "](#" not in row]
    assert [row.split("`")[1] for row in silent] == ["port"]
