"""The drawn story: bars where the time was, and nonsense from a daemon that breaks nothing."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from pdd.control.render import duration, table
from pdd.control.story import BAR_WIDTH, story_text
from pdd.wire.admin import Story, StoryLine


def story(*lines: tuple[float, str], seconds_in: dict[str, float] | None = None, **changes: object) -> Story:
    made = Story(
        request="cmpl-1",
        side="decode",
        replica="d/0",
        peer="",
        prompt_tokens=4,
        cached_tokens=0,
        output_tokens=1,
        lines=tuple(StoryLine(at_s=at_s, state=state, reason="") for at_s, state in lines),
        seconds_in=seconds_in or {},
        pieces=0,
        bytes=0,
        gigabytes_per_s=None,
        landed_before_prefill_end=None,
        ready_after_prefill_end_s=None,
        ttft_s=None,
    )
    return msgspec.structs.replace(made, **changes)


def bars(text: str) -> list[str]:
    return [line.split("|")[1] for line in text.split("\n") if line.count("|") == 2]


def test_bars_stand_where_the_time_was() -> None:
    text = story_text(story((0.0, "queued"), (1.0, "decoding"), (4.0, "finished")), "n", "#")
    quarter = BAR_WIDTH // 4
    assert bars(text) == [
        "#" * quarter + " " * 3 * quarter,
        " " * quarter + "#" * 3 * quarter,
        " " * BAR_WIDTH,
    ]


def test_a_request_that_still_runs_has_the_time_of_its_last_state() -> None:
    text = story_text(story((0.0, "queued"), (1.0, "decoding"), seconds_in={"queued": 1.0, "decoding": 3.0}), "n", "#")
    assert bars(text)[1].count("#") == 3 * BAR_WIDTH // 4


def test_what_did_not_happen_is_not_told() -> None:
    text = story_text(story((0.0, "queued")), "n")
    assert "KV moved" not in text
    assert "first token" not in text


def test_control_characters_do_not_reach_the_terminal() -> None:
    text = story_text(story((0.0, "\x1b[2Jqueued\n"), request="\x1b]0;x\x07", peer="a\rb"), "n")
    assert not any(character in text for character in "\x1b\x07\r")


def test_times() -> None:
    given_and_shown = {0.0: "0.0 ms", 0.0123: "12.3 ms", 0.5: "500 ms", 12.0: "12.0 s", 125.0: "2m05s", 7260.0: "2h01m"}
    assert {seconds: duration(seconds) for seconds in given_and_shown} == given_and_shown
    assert duration(90_000.0) == "1d01h"
    assert duration(None) == duration(float("inf")) == duration(float("nan")) == ""


def test_numbers_stand_to_the_right_and_rows_keep_their_columns() -> None:
    assert table(("NAME", "N"), [("a", 5), ("bcd", 500), (None, None)]).split("\n") == [
        "NAME    N",
        "a       5",
        "bcd   500",
        "-       -",
    ]


NUMBERS = st.floats(allow_nan=False, allow_infinity=False)
LINES = st.lists(st.tuples(NUMBERS, st.text(max_size=5)), max_size=5)


@given(lines=LINES, seconds_in=st.dictionaries(st.text(max_size=5), NUMBERS, max_size=3), number=NUMBERS)
def test_any_numbers_can_be_drawn(lines: list[tuple[float, str]], seconds_in: dict[str, float], number: float) -> None:
    odd = story(
        *lines,
        seconds_in=seconds_in,
        pieces=1,
        gigabytes_per_s=number,
        landed_before_prefill_end=number,
        ready_after_prefill_end_s=number,
        ttft_s=number,
    )
    text = story_text(odd, "n", "#")
    assert all(len(bar) == BAR_WIDTH for bar in bars(text))
    assert text.isprintable() or text.replace("\n", "").isprintable()


def test_pdctl_starts_without_heavy_packages() -> None:
    code = "import sys, pdd.control.main; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "numpy", "aiohttp", "rich", "asyncio", "structlog", "cffi"} & set(loaded)
