"""Which daemons a command talks to: a named socket, the nodes of a topology, or whatever runs on this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar

from pdd.base.errors import OperatorError
from pdd.control.client import UnreachableError, listens
from pdd.topology.load import load
from pdd.topology.run_dir import run_dir, run_roots
from pdd.wire.admin import socket_path


class UsageError(OperatorError):
    """The command line does not say what to do."""

    exit_code: ClassVar[int] = 2


def find_sockets(socket: str | None, topology: str | None, node: str | None) -> dict[str, Path]:
    """Node name to socket, never empty.

    A topology (`--topology`, or PDD_TOPOLOGY) names its nodes; of those, the ones with a socket on this machine are
    taken, the others run elsewhere. Without one, the single cluster that runs here is meant.
    Raises UsageError, UnreachableError or TopologyInvalid.
    """
    if socket is not None:
        path = Path(socket)
        return {path.name.removesuffix(".sock"): path}
    topology = topology or os.environ.get("PDD_TOPOLOGY") or None
    sockets = _of_topology(Path(topology)) if topology else _of_machine()
    if node is None:
        here = {name: path for name, path in sockets.items() if path.exists()}
        if not here:
            first = next(iter(sockets.values())).parent
            raise UnreachableError(f"{first}: no daemon of this cluster runs on this machine")
        return here
    if node not in sockets:
        raise UsageError(f"no node {node}: there are {', '.join(sockets)}")
    return {node: sockets[node]}


def _of_topology(path: Path) -> dict[str, Path]:
    """Daemons that systemd or another session of this user started may have another $XDG_RUNTIME_DIR than we have."""
    topology = load(path)
    own = run_dir(topology)
    others = [] if topology.cluster.run_dir else [root / topology.cluster.name for root in run_roots()]
    directory = next((it for it in (own, *others) if any(it.glob("*.sock"))), own)
    return {name: socket_path(directory, name) for name in topology.nodes}


def _of_machine() -> dict[str, Path]:
    clusters: dict[Path, dict[str, Path]] = {}
    for root in run_roots():
        for path in sorted(root.glob("*/*.sock")):
            if listens(path):
                clusters.setdefault(path.parent, {})[path.name.removesuffix(".sock")] = path
    if not clusters:
        looked = " or ".join(str(root) for root in run_roots())
        raise UnreachableError(f"no daemon runs here: no socket answers under {looked}")
    if len(clusters) > 1:
        names = ", ".join(str(directory) for directory in clusters)
        raise UsageError(f"several clusters run here ({names}): say which with --topology FILE or --socket PATH")
    return next(iter(clusters.values()))
