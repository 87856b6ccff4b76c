"""Daemons of the toy model on loopback, for `pdd soak`: started, killed, stopped and asked like an operator's.

Everything they need (topology, model, key, sockets, logs) is in one directory, and every port was free a moment ago.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import sys
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import yaml

from pdd.base.errors import PddError, ReplicaFailed
from pdd.base.ids import NodeName
from pdd.engine.pack import PackedModel, pack
from pdd.topology.load import load
from pdd.topology.model import Role, SameHost
from pdd.wire import admin

Reply = TypeVar("Reply", bound=msgspec.Struct)

MODEL = {
    "architectures": ["PddToyModel"], "model_type": "pdd-toy", "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "hidden_size": 32, "vocab_size": 260, "max_position_embeddings": 4096,
    "bos_token_id": None, "eos_token_id": 256, "toy_layer_seconds": 0.002,
}  # fmt: skip
"""Slow enough that faults meet requests in every state."""
REPLICA = {"page_tokens": 16, "kv_bytes": "8 MiB", "chunk_tokens": 128, "threads": 1, "max_sequences": 12}
SECTIONS: dict[str, dict[str, Any]] = {
    "cluster": {"heartbeat_s": 0.2, "silence_s": 1.0},
    "handoff": {"local_prefill_tokens": 24, "lease_s": 10.0, "verify": "pages"},
    "limits": {"max_queue": 24, "timeout_s": 30.0, "step_s": 10.0, "drain_s": 10.0},
}
"""Deadlines short enough for a run of minutes to see each of them pass."""
END_S = 60.0
READY_S = 180.0
"""An executor that is killed again and again is started again after a minute."""
ANSWER_S = 8.0
"""For an admin command: a stopped daemon answers when it is continued, after 5 s at most."""
POLL_S = 0.05


class Unanswered(PddError):
    """A daemon did not answer an admin command: it is down, or stopped."""


class Vitals(msgspec.Struct, frozen=True):
    num_fds: int
    rss_bytes: int


def two_by_two() -> dict[str, Any]:
    """Two prefillers, two decoders that both serve HTTP."""
    prefillers = {f"prefill{index}": {"replicas": [{"role": "prefill", **REPLICA}]} for index in range(2)}
    decoders = {f"decode{index}": {"http": {}, "replicas": [{"role": "decode", **REPLICA}]} for index in range(2)}
    return prefillers | decoders


class ToyCluster:
    """`nodes`: as in a topology file, on loopback; ports are chosen here. Raises TopologyInvalid."""

    def __init__(self, directory: Path, nodes: dict[str, Any], same_host: SameHost) -> None:
        self.directory = directory
        self._same_host = same_host
        self._cache = directory / "cache"
        self._file = directory / "topology.yaml"
        self._run_dir = directory / "run"
        self._write(nodes)
        self.topology = load(self._file)
        self.model: PackedModel = pack(directory / "model", self.topology.model.dtype, self._cache)
        self.nodes = list(self.topology.nodes)
        self._daemons: dict[NodeName, asyncio.subprocess.Process] = {}

    def _write(self, nodes: dict[str, Any]) -> None:
        (self.directory / "model").mkdir()
        (self.directory / "model" / "config.json").write_text(json.dumps(MODEL))
        key = self.directory / "cluster.key"
        key.touch(mode=0o600)
        key.write_text(os.urandom(32).hex())
        for node in nodes.values():
            node.pop("host", None)
            node["control_port"] = _free_port()
            if "http" in node:
                node["http"] = {"port": _free_port()}
        cluster = {"name": "soak", "key_file": str(key), "run_dir": str(self._run_dir), **SECTIONS["cluster"]}
        model = {"name": "toy", "path": str(self.directory / "model")}
        fabric = {"same_host": str(self._same_host)}
        document = {"version": 1, **SECTIONS, "fabric": fabric, "cluster": cluster, "model": model, "nodes": nodes}
        self._file.write_text(yaml.safe_dump(document))

    @property
    def urls(self) -> dict[NodeName, str]:
        """Of the nodes that serve HTTP."""
        ports = {name: node.http.port for name, node in self.topology.nodes.items() if node.http}
        return {name: f"http://127.0.0.1:{port}" for name, port in ports.items()}

    def role(self, node: NodeName) -> str:
        roles = [replica.role for replica in self.topology.nodes[node].replicas]
        return "prefill" if roles and all(role is Role.PREFILL for role in roles) else "decode"

    async def start(self, node: NodeName) -> None:
        with (self.directory / f"{node}.log").open("ab") as log:
            self._daemons[node] = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "pdd", "daemon", "--topology", str(self._file), "--node", node,
                "--end-with-parent", stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
                env={**os.environ, "PDD_CACHE": str(self._cache)},
            )  # fmt: skip

    async def wait_ready(self, node: NodeName) -> None:
        """Raises ReplicaFailed when that takes longer than a start may, after the longest pause before it."""
        try:
            async with asyncio.timeout(READY_S):
                while not await self._is_ready(node):  # noqa: ASYNC110 - another process sets no event
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise ReplicaFailed(f"{node} is not ready after {READY_S:g} s; its log is in {self.directory}") from None

    async def _is_ready(self, node: NodeName) -> bool:
        if (code := self._daemons[node].returncode) is not None:
            raise ReplicaFailed(f"{node} ended with exit code {code}; its log is in {self.directory}")
        try:
            return (await self.ask(node, "status", admin.Status)).ready
        except Unanswered:
            return False

    def send_signal(self, node: NodeName, number: signal.Signals) -> None:
        self._daemons[node].send_signal(number)

    async def wait(self, node: NodeName) -> int:
        """The exit code of a daemon that was told to end."""
        return await self._daemons[node].wait()

    def executors(self, node: NodeName) -> list[int]:
        """Process ids; empty where the daemon is gone."""
        pid = self._daemons[node].pid
        try:
            return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except OSError:
            return []

    def vitals(self, node: NodeName) -> Vitals:
        process = Path(f"/proc/{self._daemons[node].pid}")
        rss_pages = int((process / "statm").read_text().split()[1])
        return Vitals(len(list((process / "fd").iterdir())), rss_pages * os.sysconf("SC_PAGE_SIZE"))

    def num_tracebacks(self, node: NodeName) -> int:
        """What the daemon and its executors logged as faults of their own."""
        return (self.directory / f"{node}.log").read_text(errors="replace").count("Traceback (most recent call last)")

    async def ask(self, node: NodeName, command: str, kind: type[Reply], request: str | None = None) -> Reply:
        """One admin command. Raises Unanswered, or what msgspec raises for an answer that is none."""
        path = admin.socket_path(self._run_dir, node)
        try:
            async with asyncio.timeout(ANSWER_S):
                line = await _exchange(path, msgspec.json.encode(admin.AdminRequest(command=command, request=request)))
        except (OSError, ValueError, TimeoutError) as error:
            raise Unanswered(f"{path}: {error}") from error
        reply = msgspec.json.decode(line, type=admin.AdminReply)
        if reply.error is not None:
            raise Unanswered(f"{path}: {reply.error.message}")
        return msgspec.convert(reply.result, kind)

    async def close(self) -> dict[NodeName, int]:
        """Ends all daemons; their exit codes."""
        for daemon in self._daemons.values():
            if daemon.returncode is None:
                daemon.terminate()
        try:
            async with asyncio.timeout(END_S):
                await asyncio.gather(*(daemon.wait() for daemon in self._daemons.values()))
        except TimeoutError:
            for daemon in self._daemons.values():
                if daemon.returncode is None:
                    daemon.kill()
        return {node: await daemon.wait() for node, daemon in self._daemons.items()}


async def _exchange(path: Path, line: bytes) -> bytes:
    reader, writer = await asyncio.open_unix_connection(path, limit=2**24)
    try:
        writer.write(line + b"\n")
        answer = await reader.readline()
    finally:
        writer.close()
    if not answer.endswith(b"\n"):
        raise ConnectionError("closed without an answer")
    return answer


def _free_port() -> int:
    """Free a moment ago, and below the ports of outgoing connections: one of those could take the port of a daemon that
    is being restarted."""
    while True:
        port = random.randrange(10_000, 32_000)  # noqa: S311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
