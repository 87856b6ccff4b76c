"""The arguments of `pdd soak`: what a wrong one is told."""

import argparse

import pytest

from pdd.bench import soak
from pdd.topology.model import SameHost


def test_the_ways_of_pages_are_named_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    assert SameHost(parser.parse_args([]).same_host) is SameHost.COPY
    with pytest.raises(SystemExit):
        parser.parse_args(["--same-host", "foo"])
    assert "invalid choice: 'foo' (choose from 'copy', 'fabric')" in capsys.readouterr().err
