"""Runs the tests in C plain and under the sanitizers: the whole C library, libfabric aside."""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEAKS_OF_LIBFABRIC = "leak:libfabric.so\n"
"""1.17 forgets a few hundred bytes of each connection that it accepts."""
RACES_THROUGH_ALIASES = "race:pdd_copy_bytes\n"
"""A ring is mapped twice in the one process of the test: its order is hidden from a tool that sees addresses."""
BUILDS = {
    "gcc": ("gcc", ["-O2", "-fvisibility=hidden"]),
    "clang-asan-ubsan": ("clang", ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined"]),
    "clang-tsan": ("clang", ["-O1", "-fsanitize=thread"]),
}


@pytest.mark.parametrize(
    ("program", "build"),
    [("test_fabric", build) for build in BUILDS]
    + [(program, build) for program in ("test_choose", "test_terms") for build in ("gcc", "clang-asan-ubsan")],
)
def test_the_c_library(program: str, build: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, flags = BUILDS[build]
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    monkeypatch.chdir(ROOT)
    recipe = runpy.run_path("native/build_ffi.py")
    sources = [f"tests/native/{program}.c", *(f"native/{name}" for name in recipe["SOURCES"])]
    links = ["-pthread", *recipe["pkg_config"]("--cflags"), *recipe["pkg_config"]("--libs")]
    binary = tmp_path / program
    command = [compiler, *recipe["FLAGS"], "-Werror", "-g", *flags, "-Inative", *sources, *links, "-o", str(binary)]
    subprocess.run(command, check=True)
    environment = dict(os.environ)
    for tool, text in {"LSAN": LEAKS_OF_LIBFABRIC, "TSAN": RACES_THROUGH_ALIASES}.items():
        suppressions = tmp_path / tool
        suppressions.write_text(text)
        environment[f"{tool}_OPTIONS"] = f"suppressions={suppressions}:print_suppressions=0"
    done = subprocess.run([binary], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_attention_kernels_compile_without_a_warning(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    flags = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-c"]
    source = ROOT / "native" / "pdd_attention.c"
    subprocess.run([compiler, *flags, str(source), "-o", str(tmp_path / "attention.o")], check=True)
