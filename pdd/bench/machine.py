"""What a figure was measured on: no number is worth more than the machine it names."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import msgspec


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    processor: str
    num_cores: int
    """Cores that this process may use."""
    memory_bytes: int
    kernel: str
    python: str
    load_average: float
    """Of the last minute, before the measurement: above 0 the figures are of a machine that did other things too."""


def _processor(cpuinfo: str) -> str:
    names = (line.split(":", 1)[1].strip() for line in cpuinfo.splitlines() if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def this_machine() -> Machine:
    return Machine(
        processor=_processor(Path("/proc/cpuinfo").read_text()),
        num_cores=len(os.sched_getaffinity(0)),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        kernel=platform.release(),
        python=platform.python_version(),
        load_average=os.getloadavg()[0],
    )


def describe(machine: Machine) -> str:
    """One line for the top of a table."""
    return (
        f"{machine.num_cores} cores of {machine.processor}, {machine.memory_bytes / 2**30:.0f} GiB, "
        f"Linux {machine.kernel}, Python {machine.python}, load {machine.load_average:.1f}"
    )
