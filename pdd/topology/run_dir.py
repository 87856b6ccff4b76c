"""Where the admin sockets of a cluster's daemons live on a machine; pdctl and the daemons agree on it through here."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from pdd.base.errors import OperatorError
from pdd.topology.model import Topology

MAX_SOCKET_PATH_BYTES = 107
"""sockaddr_un.sun_path of Linux holds 108 bytes, the last of them zero (unix(7))."""


def run_roots() -> list[Path]:
    """Directories that may have a directory of sockets for each cluster: this user's own ones, then the system's."""
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    roots = [Path(f"/tmp/pdd-{os.getuid()}"), Path("/run/pdd")]  # noqa: S108 - made with mode 0700 by make_run_dir
    return list(dict.fromkeys([Path(runtime) / "pdd", *roots] if runtime else roots))


def run_dir(topology: Topology) -> Path:
    """The cluster's own directory."""
    return topology.cluster.run_dir or run_roots()[0] / topology.cluster.name


def make_run_dir(topology: Topology) -> Path:
    """Make the directory, mode 0700. Raises OperatorError where others could put a socket of theirs into it."""
    directory = run_dir(topology)
    for path in (directory.parent, directory):
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = path.lstat()
        except OSError as error:
            raise OperatorError(f"{path}: cannot make the directory for admin sockets: {error.strerror}") from None
        owned = found.st_uid in {os.getuid(), 0}
        closed = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) or found.st_mode & stat.S_ISVTX
        if not owned or not closed or not path.resolve().is_dir():
            text = f"{path}: belongs to another user or may be written by others"
            raise OperatorError(f"{text}: name a directory of your own in cluster.run_dir")
    return directory


def socket_path_bytes(directory: Path, node: str) -> int:
    """Length of the path of a node's admin socket."""
    return len(os.fsencode(directory / f"{node}.sock"))
