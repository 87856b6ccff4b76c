"""Builds `pdd._attention`, the CPU kernels of the executor. `python native/build_attention.py` builds it in place."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from cffi import FFI

NATIVE = Path(__file__).resolve().parent


def declarations() -> str:
    """The header without its preprocessor lines is what cffi reads."""
    header = (NATIVE / "pdd_attention.h").read_text()
    return "\n".join(line for line in header.splitlines() if not line.startswith("#"))


def openmp_flags() -> list[str]:
    """-fopenmp where the compiler has its run time (clang often comes without); else the kernels use one thread."""
    compiler = os.environ.get("CC", "cc").split()
    with tempfile.TemporaryDirectory() as directory:
        source = Path(directory) / "probe.c"
        source.write_text("#include <omp.h>\nint main(void) { return omp_get_max_threads() < 1; }\n")
        command = [*compiler, "-fopenmp", str(source), "-o", str(Path(directory) / "probe")]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except OSError:
            return []
    return ["-fopenmp"] if done.returncode == 0 else []


def ffi_builder() -> FFI:
    builder = FFI()
    builder.cdef(declarations())
    openmp = openmp_flags()
    builder.set_source(
        "pdd._attention",
        '#include "pdd_attention.c"',
        include_dirs=[str(NATIVE)],
        depends=[str(NATIVE / "pdd_attention.c"), str(NATIVE / "pdd_attention.h")],
        extra_compile_args=["-O3", "-std=gnu11", "-Wall", "-Wextra", "-fno-math-errno", *openmp],
        extra_link_args=["-lm", *openmp],
    )
    return builder


ffibuilder = ffi_builder()

if __name__ == "__main__":
    built = Path(ffibuilder.compile(tmpdir=str(NATIVE.parent / "build")))
    shutil.copy2(built, NATIVE.parent / "pdd" / built.name)
