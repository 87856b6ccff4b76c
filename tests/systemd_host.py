"""A systemd of a test's own, first process of namespaces that the test made: units are run, not only read.

    test --- nsenter ---> systemctl, pdctl | systemd --- pdd@prefill0, pdd@decode0 (user pdd, as hardened as on a host)

/etc, /opt, /run, /var/lib and /var/cache are its own; the network is the machine's loopback.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from cluster import TOY_MODEL

UNITS = Path(__file__).parents[1] / "systemd"
SYSTEMD = Path("/lib/systemd/systemd")
TARGETS = ("basic", "sysinit", "sockets", "paths", "timers", "slices", "network", "network-online", "shutdown")
PATIENCE_S = 60.0
INIT = """
set -e
mount --make-rprivate /
mount -t proc proc /proc
for own in /run /opt /var/lib /var/cache; do mount -t tmpfs tmpfs $own; done
umount -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cp -a /etc /run/etc
mount --bind /run/etc /etc
echo 'pdd:x:960:960::/var/lib/pdd:/usr/sbin/nologin' >> /etc/passwd
echo 'pdd:x:960:' >> /etc/group
mkdir -p /run/units /etc/pdd /opt/pdd/.venv/bin /opt/pdd/source /opt/pdd/packages /opt/pdd/python
mount --bind "$SOURCE" /opt/pdd/source
mount --bind "$PACKAGES" /opt/pdd/packages
mount --bind "$PYTHON" /opt/pdd/python
cp -r "$GIVEN"/etc/. /etc/pdd
chown -R pdd:pdd /etc/pdd/cluster.key
cp "$GIVEN"/bin/* /opt/pdd/.venv/bin
cp "$GIVEN"/units/* /run/units
export container=pdd SYSTEMD_UNIT_PATH=/run/units
exec "$SYSTEMD" --system --log-target=console
"""
PROGRAM = """#!/bin/sh
export PYTHONHOME=/opt/pdd/python PYTHONPATH=/opt/pdd/source:/opt/pdd/packages LD_LIBRARY_PATH=/opt/pdd/python/lib
exec /opt/pdd/python/bin/{python} -m {module} "$@"
"""


class NoSystemd(Exception):
    """It cannot be run here; the text says why."""


class SystemdHost:
    """`topology`: its contents, whose key file is made."""

    def __init__(self, directory: Path, topology: dict[str, Any]) -> None:
        self._given, self._log = directory / "given", directory / "systemd.log"
        self._group = _own_group() / f"pdd-test-{os.getpid()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._make_files(topology)

    def _make_files(self, topology: dict[str, Any]) -> None:
        etc, programs, units = (self._given / name for name in ("etc", "bin", "units"))
        for made in (etc, programs, units):
            made.mkdir(parents=True)
        shutil.copytree(TOY_MODEL, etc / "toy-model")
        (etc / "topology.yaml").write_text(yaml.safe_dump(topology))
        (etc / "cluster.key").touch(mode=0o600)
        (etc / "cluster.key").write_text("k" * 64)
        python = Path(os.path.realpath(sys.executable)).name
        for name, module in {"pdd": "pdd", "pdctl": "pdd.control.main"}.items():
            (programs / name).write_text(PROGRAM.format(python=python, module=module))
            (programs / name).chmod(0o755)
        for unit in UNITS.iterdir():
            shutil.copy(unit, units)
        for target in TARGETS:
            shutil.copy(SYSTEMD.parent / "system" / f"{target}.target", units)
        (units / "default.target").write_text("[Unit]\nRequires=basic.target\nAfter=basic.target\n")

    def start(self) -> None:
        """Raises NoSystemd."""
        try:
            self._group.mkdir()
        except OSError as error:
            raise NoSystemd(f"no cgroup of its own: {error}") from error
        environment = {
            **os.environ,
            "SOURCE": str(UNITS.parent),
            "PACKAGES": sysconfig.get_path("purelib"),
            "PYTHON": sys.base_prefix,
            "GIVEN": str(self._given),
            "SYSTEMD": str(SYSTEMD),
        }
        with self._log.open("wb") as log:
            command = ["unshare", "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--fork", "--kill-child"]
            self._process = subprocess.Popen(
                ["sh", "-c", f'echo 0 > {self._group}/cgroup.procs; exec "$@"', "sh", *command, "sh", "-c", INIT],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._is_up():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                raise NoSystemd(f"systemd does not get up here: {self._log.read_text()[-2000:]}")
            time.sleep(0.1)

    def _is_up(self) -> bool:
        is_active = ("systemctl", "is-active", "default.target")
        return bool(self._first()) and self.run(*is_active, check=False).stdout == "active\n"

    def _first(self) -> str:
        """Its process number as we see it; empty while there is none."""
        assert self._process is not None
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        return children.read_text().strip() if self._process.poll() is None else ""

    def run(self, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Inside. Raises CalledProcessError."""
        enter = ["nsenter", "-t", self._first(), "--pid", "--mount", "--ipc", "--uts", "--cgroup", "--"]
        return subprocess.run(
            [*enter, *command], check=check, capture_output=True, text=True, timeout=PATIENCE_S,
            env={**os.environ, "XDG_RUNTIME_DIR": "/run"},
        )  # fmt: skip

    def show(self, unit: str) -> dict[str, str]:
        """Properties of a unit."""
        lines = self.run("systemctl", "show", unit).stdout.splitlines()
        return dict(line.split("=", 1) for line in lines if "=" in line)

    def remove(self) -> None:
        """Ends it and all that runs in it."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)  # its child, the first process there, goes with it
            self._process.wait()
        deadline_s = time.monotonic() + PATIENCE_S
        while self._group.exists() and time.monotonic() < deadline_s:
            for group, _, _ in os.walk(self._group, topdown=False):
                with contextlib.suppress(OSError):  # its last process has not quite ended
                    os.rmdir(group)
            time.sleep(0.05)


def _own_group() -> Path:
    """Raises NoSystemd."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    roots = [Path(fields[1]) for fields in mounts if fields[2] == "cgroup2"]
    own = [line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::")]
    if not roots or not own:
        raise NoSystemd("there is no cgroup2 file system")
    return roots[0] / own[0].lstrip("/")


@contextmanager
def systemd_host(directory: Path, topology: dict[str, Any]) -> Iterator[SystemdHost]:
    """Raises NoSystemd where it cannot be run."""
    if os.geteuid() or not SYSTEMD.exists() or not all(map(shutil.which, ("unshare", "nsenter", "systemctl"))):
        raise NoSystemd("it takes root, systemd, unshare and nsenter")
    host = SystemdHost(directory, topology)
    try:
        host.start()
        yield host
    finally:
        host.remove()
