"""Runs the tests in C plain and under the sanitizers: the whole C library, libfabric aside.

One program again, say one seed of a fuzzer: `python tests/native/test_native_fabric.py BUILD PROGRAM ARGUMENTS`.
"""

from __future__ import annotations

import os
import runpy
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
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
WITH_FAKE_PROVIDER = ("fuzz_fabric", "test_faults", "test_hostile")
WRAPPED = ("fi_getinfo", "fi_fabric", "clock_gettime", "fopen", "bind")
WAYS = ("fake", "tcp", "copies")
SEEDS = {"gcc": (120, 20, 60), "clang-asan-ubsan": (100, 15, 60), "clang-tsan": (60, 8, 30)}
"""Of the fuzzer, for each build: over the fake provider, over TCP, by copies."""


class Build:
    """The C library compiled once for one set of flags, and the programs that are linked with it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.compiler, self.flags = BUILDS[name]
        self.folder = folder
        self.recipe = runpy.run_path(str(ROOT / "native" / "build_ffi.py"))
        sources = [ROOT / "native" / source for source in self.recipe["SOURCES"]]
        with ThreadPoolExecutor(max_workers=2) as pool:
            self.objects = list(pool.map(self.compile, sources))
        for tool, text in {"lsan": LEAKS_OF_LIBFABRIC, "tsan": RACES_THROUGH_ALIASES}.items():
            (folder / tool).write_text(text)

    def compile(self, source: Path) -> Path:
        compiled = self.folder / f"{source.stem}.o"
        if not compiled.exists():
            command = [self.compiler, *self.recipe["FLAGS"], "-Werror", "-g", *self.flags, "-I", str(ROOT / "native")]
            command += [*self.recipe["pkg_config"]("--cflags"), "-c", str(source), "-o", str(compiled)]
            subprocess.run(command, check=True)
        return compiled

    def link(self, program: str) -> Path:
        binary = self.folder / program
        if binary.exists():
            return binary
        objects, links = [self.compile(ROOT / "tests" / "native" / f"{program}.c"), *self.objects], []
        if program in WITH_FAKE_PROVIDER:
            objects.append(self.compile(ROOT / "tests" / "native" / "fake_fabric.c"))
            links = [f"-Wl,--wrap={name}" for name in WRAPPED]
        command = [self.compiler, *self.flags, *map(str, objects), *links, "-pthread"]
        subprocess.run([*command, *self.recipe["pkg_config"]("--libs"), "-o", str(binary)], check=True)
        return binary

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "IPATH_NO_BACKTRACE": "1"}  # else PSM2 writes a file where a program crashes
        for tool in ("lsan", "tsan"):
            options = f"suppressions={self.folder / tool}:print_suppressions=0"
            environment[f"{tool.upper()}_OPTIONS"] = options
        command = [str(self.link(program)), *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module", params=BUILDS)
def build(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Build:
    name: str = request.param
    if shutil.which(BUILDS[name][0]) is None:
        pytest.skip(f"{BUILDS[name][0]} is not installed")
    return Build(name, tmp_path_factory.mktemp(name))


@pytest.mark.parametrize("program", ["test_fabric", "test_choose", "test_terms", "test_faults", "test_hostile"])
def test_the_c_library(program: str, build: Build) -> None:
    done = build.run(program)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("way", WAYS)
def test_random_calls_of_the_c_library(way: str, build: Build) -> None:
    done = build.run("fuzz_fabric", way, "0", str(SEEDS[build.name][WAYS.index(way)]))
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize("compiler", ["gcc", "clang"])
def test_the_attention_kernels_compile_without_a_warning(compiler: str, tmp_path: Path) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    flags = ["-std=gnu11", "-O3", "-fopenmp", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", "-c"]
    source = ROOT / "native" / "pdd_attention.c"
    subprocess.run([compiler, *flags, str(source), "-o", str(tmp_path / "attention.o")], check=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        again = Build(sys.argv[1], Path(scratch)).run(*sys.argv[2:])
    sys.exit(again.stdout + again.stderr if again.returncode else 0)
