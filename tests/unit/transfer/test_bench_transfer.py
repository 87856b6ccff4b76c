"""`pdd bench transfer` over real ports: it measures only handoffs whose bytes are right."""

from __future__ import annotations

import argparse

import msgspec
import pytest

from pdd.base.errors import InvariantBroken, TopologyInvalid
from pdd.bench import transfer


def parse(text: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    transfer.add_arguments(parser)
    return parser.parse_args([*text.split(), "--layers", "2", "--head-dim", "16", "--rounds", "2"])


@pytest.mark.parametrize(
    ("options", "num_pieces"),
    [
        ("--from tp2 --to tp1 --heads 2 --tokens 64", 2 * 4 * 4),
        ("--from tp1 --to tp2 --heads 2 --tokens 64 --page-tokens 16:32", 2 * 4 * 4),
        ("--from tp3 --to tp1 --heads 3 --tokens 33 --page-tokens 32:16", 2 * 4 * 6),
        ("--from tp2 --to tp2 --mla --tokens 48", 2 * 3 * 2),
        ("--from tp2 --to tp1 --heads 2 --tokens 128 --nics 2", 2 * 8 * 4),
    ],
)
def test_real_ports_reshard(capsys: pytest.CaptureFixture[str], options: str, num_pieces: int) -> None:
    assert transfer.run(parse(options + " --json")) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=transfer.Report)
    asked, equal, small = report.results
    assert asked.num_bytes == equal.num_bytes == small.num_bytes
    assert (asked.num_pieces, small.num_pieces) == (num_pieces, num_pieces)
    assert equal.num_pieces <= num_pieces
    assert all(len(row.seconds) == 2 for row in report.results)


def test_the_table_names_shapes_and_the_ratio(capsys: pytest.CaptureFixture[str]) -> None:
    assert transfer.run(parse("--from tp2 --to tp1 --heads 2 --tokens 32")) == 0
    out = capsys.readouterr().out
    assert "tp2/16 -> tp1/16" in out
    assert "times as long as equal ones" in out


def test_wrong_bytes_are_no_figure() -> None:
    arguments = parse("--from tp2 --to tp1 --heads 2 --tokens 32")
    source, target = transfer.asked_shapes(arguments)
    pair = transfer.Pair("asked", arguments.provider, source, target, 32, nics=1)
    try:
        model = pair.fill()
        pair.seconds()
        pair.check(model)
        pair.target.cache(0)[1, 0, 1, 1, 3, 0] ^= 1
        with pytest.raises(InvariantBroken, match="rank 0"):
            pair.check(model)
    finally:
        pair.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--from tp2 --to tp1 --heads 3", "tp 2 and 3 KV heads"),
        ("--from tp1 --to tp1 --page-tokens 16:24", "page_tokens: 16 at the prefiller, 24 at the decoder"),
    ],
)
def test_shapes_that_do_not_fit(options: str, words: str) -> None:
    with pytest.raises(TopologyInvalid, match=words):
        transfer.run(parse(options))


@pytest.mark.parametrize("options", ["--from 4 --to tp1", "--from tp0 --to tp1", "--from tp1 --to tp1 --page-tokens 0"])
def test_what_is_no_option(capsys: pytest.CaptureFixture[str], options: str) -> None:
    with pytest.raises(SystemExit):
        parse(options)
    assert "is not like" in capsys.readouterr().err
