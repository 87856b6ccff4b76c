"""Builds `pdd._fabric`, the Python face of pdd_fabric.h (cffi, out of line: compiled once, at installation)."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).parent if "__file__" in globals() else Path("native")
SOURCES = [
    "pdd_fabric.c",
    "pdd_choose.c",
    "pdd_region.c",
    "pdd_open.c",
    "pdd_nic.c",
    "pdd_address.c",
    "pdd_memory.c",
    "pdd_peer.c",
    "pdd_watch.c",
    "pdd_path.c",
    "pdd_copying.c",
    "pdd_copy.c",
    "pdd_serve.c",
    "pdd_bytes.c",
    "pdd_write.c",
    "pdd_count.c",
    "pdd_progress.c",
]
FLAGS = ["-std=gnu11", "-O2", "-Wall", "-Wextra", "-fvisibility=hidden", "-pthread"]


def pkg_config(*arguments: str) -> list[str]:
    """What pkg-config says of libfabric; ends the build with advice when it is not there."""
    program = shutil.which("pkg-config")
    if program is None:
        raise SystemExit("pdd needs pkg-config to find libfabric. On Debian: apt-get install pkg-config libfabric-dev")
    found = subprocess.run([program, *arguments, "libfabric >= 1.17"], capture_output=True, text=True, check=False)
    if found.returncode:
        advice = "pdd needs the headers of libfabric 1.17 or newer. On Debian: apt-get install libfabric-dev"
        raise SystemExit(f"{advice}\n{found.stderr}")
    return found.stdout.split()


def make_ffi() -> FFI:
    ffi = FFI()
    header = (HERE / "pdd_fabric.h").read_text()
    ffi.cdef("\n".join(line for line in header.splitlines() if not line.startswith("#")))
    ffi.set_source(
        "pdd._fabric",
        '#include "pdd_fabric.h"',
        sources=[f"native/{name}" for name in SOURCES],
        include_dirs=["native"],
        depends=[f"native/{header.name}" for header in HERE.glob("*.h")],
        extra_compile_args=[*FLAGS, *pkg_config("--cflags")],
        extra_link_args=["-pthread", *pkg_config("--libs")],
    )
    return ffi


ffibuilder = make_ffi()
