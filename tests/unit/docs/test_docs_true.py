"""What hand-written pages claim and a test can check: examples load, files exist, commands are the parser's."""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from openai import OpenAI

from pdd._fabric import ffi
from pdd.base.errors import TopologyInvalid
from pdd.bench.__main__ import BENCHES
from pdd.control.main import _parser
from pdd.fabric.immediate import GENERATION_BITS, MAX_WEIGHT, NUM_SLOTS, SLOT_BITS, WEIGHT_BITS
from pdd.topology.check import warnings
from pdd.topology.load import load
from pdd.wire.messages import AnyMessage

ROOT = Path(__file__).parents[3]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
README = (ROOT / "README.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
DECISIONS = sorted((ROOT / "docs" / "adr").glob("[0-9]*.md"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def words_of_prose(text: str) -> str:
    """Without its fenced blocks."""
    return re.sub(r"```.*?```", "", text, flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_topologies_load_without_warnings(page: Path, tmp_path: Path) -> None:
    for number, block in enumerate(blocks(page.read_text(), "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(block)
        assert warnings(load(file)) == []


def test_the_readme_has_topologies_and_a_misspelt_one_would_be_noticed(tmp_path: Path) -> None:
    first, *others = blocks(README, "yaml")
    assert others
    file = tmp_path / "misspelt.yaml"
    file.write_text(first.replace("kv_bytes", "kv_byte"))
    with pytest.raises(TopologyInvalid, match="did you mean kv_bytes"):
        load(file)


def test_every_counter_of_the_fabric_is_explained() -> None:
    [row] = [line for line in (ROOT / "docs" / "metrics.md").read_text().splitlines() if line.startswith("| `kind` |")]
    explained = re.findall(r"`(\w+)`", row.partition("Of `fabric`")[2].partition("Of `link_faults`")[0])
    assert explained == [name.removeprefix("num_") for name, _ in ffi.typeof("struct pdd_stats").fields]


def test_the_client_snippet_uses_what_the_openai_client_has() -> None:
    (snippet,) = blocks(README, "python")
    tree = ast.parse(snippet)
    client = OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    calls = {ast.unparse(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    create = calls["client.chat.completions.create"]
    known = inspect.signature(client.chat.completions.create).parameters
    assert not create.args
    assert {keyword.arg for keyword in create.keywords} <= known.keys()
    assert {keyword.arg for keyword in calls["OpenAI"].keywords} <= inspect.signature(OpenAI).parameters.keys()


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    named = re.findall(r"`((?:pdd|native|tests|docs|topology|systemd)/[\w./@-]*\w/?)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    links = [link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", words_of_prose(text))]
    relative = [link for link in links if link and "://" not in link]
    assert [link for link in relative if not (page.parent / link).exists()] == []


def test_the_life_of_a_request_names_one_file_a_line() -> None:
    life = README.partition("## The life of a request")[2].partition("##")[0]
    steps = re.findall(r"^\d+\. .*?(?=^\d+\. |\n\n(?!\d))", life, re.MULTILINE | re.DOTALL)
    assert 10 <= len(steps) <= 12
    assert [len(re.findall(r"`(?:pdd|native)/[^`]*`", step)) for step in steps] == [1] * len(steps)


def test_the_readme_lists_the_commands_of_pdctl() -> None:
    section = README.partition("## pdctl")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `pdctl ((?:topology )?[a-z]+)", section, re.MULTILINE))
    assert listed == commands_of(_parser(), "")


def commands_of(parser: argparse.ArgumentParser, prefix: str) -> set[str]:
    found: set[str] = set()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, sub in action.choices.items():
                found |= commands_of(sub, f"{prefix}{name} ") or {prefix + name}
    return found


def test_benches_that_are_explained_are_those_that_there_are() -> None:
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert set(re.findall(r"pdd bench ([a-z]+)", text)) == set(BENCHES)


def test_the_floors_are_those_of_the_contract() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"][0]
    drawn = ARCHITECTURE.partition("## Floors")[2].partition("```")[2].partition("```")[0]
    assert [re.split(r"\s{2,}", line)[0] for line in drawn.strip().splitlines()] == contract["layers"]


def test_the_messages_of_the_diagram_exist() -> None:
    names = {message.__name__ for message in AnyMessage.__args__}
    diagram = ARCHITECTURE.partition("## One request through both daemons")[2].partition("```")[2].partition("```")[0]
    drawn = re.findall(r"(?:\|-- |<- )([A-Z][a-z][A-Za-z]*)", diagram)
    assert len(drawn) >= 5
    assert set(drawn) <= names


def test_the_keepers_of_invariants_exist() -> None:
    section = ARCHITECTURE.partition("## Where each invariant is kept")[2].partition("\n## ")[0]
    sources = "\n".join(path.read_text() for path in (ROOT / "pdd").rglob("*.py"))
    keepers = re.findall(r"`([A-Z][A-Za-z]+)(?:\.(\w+))?`", section)
    assert len(keepers) > 5
    for owner, member in keepers:
        assert re.search(rf"^class {owner}\b", sources, re.MULTILINE), owner
        assert not member or re.search(rf"def {member}\(", sources), member


def test_series_that_are_explained_exist() -> None:
    prose, _, watched = (ROOT / "docs" / "metrics.md").read_text().partition("## What to watch")
    series = re.findall(r"`(pdd:\w+)", watched)
    assert series
    assert [name for name in series if f"| `{name.removesuffix('_total')}` |" not in prose] == []


def test_the_immediate_s_bits() -> None:
    section = ARCHITECTURE.partition("## The immediate")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+)-(\d+) \| .*?\((\d+)\)", section, re.MULTILINE)
    assert [int(bits) for *_, bits in rows] == [SLOT_BITS, GENERATION_BITS, WEIGHT_BITS]
    assert all(int(high) - int(low) + 1 == int(bits) for high, low, bits in rows)
    assert f"1 to {MAX_WEIGHT}" in section
    assert str(NUM_SLOTS) in (ROOT / "docs" / "adr" / "0001-counted-immediates.md").read_text()


@pytest.mark.parametrize("page", DECISIONS, ids=name_of)
def test_a_decision_has_its_three_parts_and_is_listed(page: Path) -> None:
    text = page.read_text()
    number = int(page.name[:4])
    title = text.splitlines()[0]
    assert re.match(rf"# {number}\. ", title)
    assert re.findall(r"^## (.*)", text, re.MULTILINE) == ["Context", "Decision", "Consequences"]
    assert f"{number}. [{title.partition('. ')[2]}]({page.name})" in (page.parent / "README.md").read_text()


def test_decisions_are_numbered_without_a_gap() -> None:
    assert [int(page.name[:4]) for page in DECISIONS] == list(range(1, len(DECISIONS) + 1))
