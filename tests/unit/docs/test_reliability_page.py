"""The table of public faults names tests that there are."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "reliability.md").read_text()
ROWS = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", PAGE, re.MULTILINE)


def test_every_kind_has_a_row() -> None:
    assert [int(number) for number, *_ in ROWS] == [*range(1, 4), *range(5, 8), 9, *range(10, 14), 15, 17, 18, 20, 22,
                                                    24, *range(26, 31)]  # fmt: skip


@pytest.mark.parametrize("tests", [tests for *_, tests in ROWS], ids=[number for number, *_ in ROWS])
def test_its_tests_exist(tests: str) -> None:
    named = re.findall(r"`(\S+\.py)`::`(test_\w+)`", tests)
    assert named
    for file, name in named:
        assert re.search(rf"def {name}\(", (ROOT / file).read_text()), f"{file} has no {name}"
