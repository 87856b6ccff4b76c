"""The targets of tests/fuzz hold for their seeds and for what hypothesis makes of bytes; without atheris they skip."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

FILE = Path(__file__).parents[1] / "fuzz" / "fuzz_codec.py"


@pytest.fixture(scope="module")
def fuzz() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_codec", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_seeds_reach_every_target(fuzz: ModuleType) -> None:
    targets = fuzz.targets()
    seeds = fuzz.seeds()
    assert {seed[0] for seed in seeds} == set(range(len(targets)))
    for seed in seeds:
        targets[seed[0]](seed[1:])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.binary(max_size=300))
def test_targets_take_any_bytes(fuzz: ModuleType, data: bytes) -> None:
    for target in fuzz.targets():
        target(data)


@pytest.mark.skipif(importlib.util.find_spec("atheris") is not None, reason="atheris is here: run it by hand")
def test_without_atheris_it_skips_with_a_reason() -> None:
    done = subprocess.run([sys.executable, FILE], capture_output=True, text=True, check=True)
    assert "skipped: atheris is not installed" in done.stdout
