"""`pdd up`: all nodes of a topology on this machine, each a daemon process of its own; ends when the first one ends."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import structlog

from pdd.base.errors import ReplicaFailed
from pdd.base.ids import NodeName
from pdd.daemon.service import on_signals
from pdd.topology.model import Topology

log = structlog.get_logger(__name__)

_END_S = 30.0
"""How long daemons may take to end after their drain."""


async def run_nodes(topology_file: Path, topology: Topology, log_level: str) -> None:
    """Returns after a signal, when all daemons have drained. Raises ReplicaFailed when one ended by itself."""
    stopping = asyncio.Event()
    on_signals(lambda _: stopping.set())
    daemons = {node: await _start(topology_file, node, log_level) for node in topology.nodes}
    waits = {asyncio.create_task(daemon.wait()): node for node, daemon in daemons.items()}
    stop = asyncio.create_task(stopping.wait())
    done, _ = await asyncio.wait((stop, *waits), return_when=asyncio.FIRST_COMPLETED)
    ended = [waits[task] for task in done if task is not stop]
    for daemon in daemons.values():
        if daemon.returncode is None:
            daemon.terminate()
    _, late = await asyncio.wait(waits, timeout=topology.limits.drain_s + _END_S)
    for task in late:
        log.warning("daemon does not end; killing it", daemon=waits[task])
        daemons[waits[task]].kill()
    await asyncio.wait(waits)
    stop.cancel()
    if ended and not stopping.is_set():
        codes = ", ".join(f"{node} with exit code {daemons[node].returncode}" for node in ended)
        raise ReplicaFailed(f"a daemon ended by itself: {codes}; its log above says why")


async def _start(topology_file: Path, node: NodeName, log_level: str) -> asyncio.subprocess.Process:
    # A session of its own: ctrl-C reaches the daemons through us alone, once, as SIGTERM.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdd", "daemon", "--topology", str(topology_file), "--node", node,
        "--log-level", log_level, "--end-with-parent", stdin=asyncio.subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
