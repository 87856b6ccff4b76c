"""Where the admin sockets of a cluster's daemons live on a machine; pdctl and the daemons agree on it through here."""

from __future__ import annotations

import os
from pathlib import Path

from pdd.topology.model import Topology

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un.sun_path of Linux holds 108 bytes, the last of them zero (unix(7))."""


def run_root() -> Path:
    """The directory that has one directory of sockets for each cluster of this user."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime) / "pdd" if runtime else Path(f"/tmp/pdd-{os.getuid()}")  # noqa: S108 - made with mode 0700


def run_dir(topology: Topology) -> Path:
    """The cluster's own directory. Whoever makes it makes it with mode 0700 and refuses one of another owner."""
    return topology.cluster.run_dir or run_root() / topology.cluster.name


def socket_path_bytes(directory: Path, node: str) -> int:
    """Length of the path of a node's admin socket."""
    return len(os.fsencode(directory / f"{node}.sock"))
