"""`pdd soak` itself: it finds nothing in a sound cluster, and it would find something in another."""

from __future__ import annotations

import asyncio
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from cluster import TOY_MODEL

from pdd.base.ids import NodeName
from pdd.bench.chaos import Chaos
from pdd.bench.soak import Report
from pdd.bench.traffic import Answer, Ask, Oracle
from pdd.engine.pack import pack

ASK = Ask(prompt=list(range(40)), max_tokens=12)


@pytest.fixture
def oracle(tmp_path: Path) -> Oracle:
    return Oracle(pack(TOY_MODEL, "float32", tmp_path / "cache").config, page_tokens=16)


def test_a_right_answer_and_any_beginning_of_it_pass(oracle: Oracle) -> None:
    text, reason = oracle.text(ASK)
    assert oracle.contradicts(ASK, Answer(texts=[text], finish_reasons=[reason])) is None
    assert oracle.contradicts(ASK, Answer(texts=[text[:3]], finish_reasons=[None])) is None
    assert oracle.contradicts(ASK, Answer(texts=[""], finish_reasons=[None])) is None


@pytest.mark.parametrize("wrong", ["one letter", "too short", "another reason", "a wrong beginning", "second choice"])
def test_what_is_wrong_is_noticed(oracle: Oracle, wrong: str) -> None:
    text, reason = oracle.text(ASK)
    changed = text[:4] + chr(ord(text[4]) ^ 1) + text[5:]
    answer = {
        "one letter": Answer(texts=[changed], finish_reasons=[reason]),
        "too short": Answer(texts=[text[:-1]], finish_reasons=[reason]),
        "another reason": Answer(texts=[text], finish_reasons=["stop"]),
        "a wrong beginning": Answer(texts=[changed[:6]], finish_reasons=[None]),
        "second choice": Answer(texts=[text, changed], finish_reasons=[reason, reason]),
    }[wrong]
    assert oracle.contradicts(ASK, answer) == text


@pytest.mark.parametrize("bad", [{"wrong": 1}, {"leaks": ["a page"]}, {"problems": ["an answer that never ends"]}])
def test_anything_found_is_a_failure(bad: dict[str, object]) -> None:
    fine: dict[str, object] = {"seed": 0, "duration_s": 1.0, "outcomes": {}, "faults": {}, "wrong": 0, "leaks": [],
                               "problems": [], "around_s": {}, "back_s": {}, "pages_s": [], "counters": {}}  # fmt: skip
    assert not Report(**fine).failed  # type: ignore[arg-type]
    assert Report(**(fine | bad)).failed  # type: ignore[arg-type]


class QuietCluster:
    """Nodes to which nothing really happens."""

    nodes = (NodeName("prefill0"), NodeName("prefill1"), NodeName("decode0"), NodeName("decode1"))
    urls = {NodeName("decode0"): "zero", NodeName("decode1"): "one"}

    def role(self, node: NodeName) -> str:
        return node[:-1]

    async def wait_ready(self, node: NodeName) -> None: ...

    async def probe(self, url: str) -> bool:
        return True


@pytest.mark.parametrize(("at_once", "most"), [(1, 1), (4, 2)])
async def test_faults_are_kept_apart_or_one_of_each_role_at_a_time(at_once: int, most: int) -> None:
    quiet: Any = QuietCluster()
    chaos = Chaos(quiet, quiet, random.Random(0), pause_s=0.001, lasting=set(), at_once=at_once)
    under_way: list[int] = []

    async def fault(node: NodeName, done: asyncio.Event) -> None:
        under_way.append(len(chaos._faulty))
        done.set()
        await asyncio.sleep(0.02)

    chaos._kinds = {"fault": fault}
    await chaos.run(time.monotonic() + 0.5)
    assert max(under_way) == most
    assert chaos.problems == []


@pytest.mark.parametrize("options", [[], ["--apart", "--only", "SIGKILL daemon"]], ids=["overlapping", "apart"])
async def test_a_short_soak_finds_nothing(options: list[str]) -> None:
    soak = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdd", "soak", "--minutes", "0.1", "--seed", "1", "--fault-pause-s", "1", *options,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    printed = (await soak.communicate())[0].decode()
    assert soak.returncode == 0, printed
    assert printed.startswith("seed 1;")
    assert int(re.search(r"(\d+)  right", printed)[1]) > 10, printed  # type: ignore[index]
    assert "wrong answers: 0\nleaks: 0\nother problems: 0" in printed
