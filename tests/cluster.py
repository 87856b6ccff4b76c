"""Real daemons on loopback: a topology file, one process a node, and questions over HTTP and admin sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import yaml

from pdd.wire.admin import AdminReply, AdminRequest

TOY_MODEL = Path(__file__).parents[1] / "topology" / "toy-model"
START_S = 60.0
SETTLE_S = 20.0
HANDOFF_ALL = {"local_prefill_tokens": 0}
ENDED = ("finished", "cancelled", "failed", "sent")


def free_ports(num: int) -> list[int]:
    """Ports that were free a moment ago, from below those that the system gives to outgoing connections: one of those
    could take the port of a daemon that is being restarted."""
    ports: list[int] = []
    while len(ports) < num:
        port = random.randrange(10_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            ports += [port] if port not in ports else []
    return ports


def prefill_and_decode(**replica: Any) -> dict[str, Any]:
    """Nodes of a topology: one prefiller, one decoder that serves HTTP."""
    control0, control1, http = free_ports(3)
    common = {"page_tokens": 16, "kv_bytes": "8 MiB", "chunk_tokens": 64, "threads": 1, **replica}
    return {
        "prefill0": {"control_port": control0, "replicas": [{"role": "prefill", **common}]},
        "decode0": {"control_port": control1, "http": {"port": http}, "replicas": [{"role": "decode", **common}]},
    }


def colocated(**replica: Any) -> dict[str, Any]:
    control, http = free_ports(2)
    common = {"page_tokens": 16, "kv_bytes": "8 MiB", "chunk_tokens": 64, "threads": 1, **replica}
    return {
        "node0": {"control_port": control, "http": {"port": http}, "replicas": [{"role": "colocated", **common}]},
    }


class Cluster:
    def __init__(self, directory: Path, nodes: dict[str, Any], model: Path, cache: Path, **sections: Any) -> None:
        self.directory = directory
        self.cache = cache
        self.nodes = nodes
        self.file = directory / "topology.yaml"
        self.run_dir = directory / "run"
        topology = {
            "version": 1,
            "cluster": {"name": "test", "key_file": "cluster.key", "run_dir": str(self.run_dir)},
            "model": {"name": "toy", "path": str(model)},
            "nodes": nodes,
        }
        for name, section in sections.items():
            topology[name] = {**topology.get(name, {}), **section}
        self.file.write_text(yaml.safe_dump(topology))
        key = directory / "cluster.key"
        if not key.exists():
            key.touch(mode=0o600)
            key.write_text("k" * 64)
        self.daemons: dict[str, asyncio.subprocess.Process] = {}
        http = next(node["http"] for node in nodes.values() if "http" in node)
        self.url = f"http://{http.get('host', '127.0.0.1')}:{http['port']}"
        self.within: dict[str, list[str]] = {}
        """Commands that daemons are started with, such as `ip netns exec NAME`."""
        self.session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=60))

    async def start(self, *names: str) -> None:
        for name in names or self.nodes:
            log = (self.directory / f"{name}.log").open("ab")
            with log:
                self.daemons[name] = await asyncio.create_subprocess_exec(
                    *self.within.get(name, ()), sys.executable, "-m", "pdd", "daemon",
                    "--topology", str(self.file), "--node", name,
                    stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                    env={**os.environ, "PDD_CACHE": str(self.cache)},
                )  # fmt: skip

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()

    async def wait_ready(self) -> None:
        async def ready() -> bool:
            for name, daemon in self.daemons.items():
                if daemon.returncode is not None:
                    raise AssertionError(f"{name} ended with {daemon.returncode}:\n{self.log(name)}")
            try:
                async with self.session.get(f"{self.url}/ready") as response:
                    served = response.status == 200
                return served and all([(await self.ask(name, "status"))["ready"] for name in self.daemons])
            except (aiohttp.ClientConnectionError, FileNotFoundError, ConnectionRefusedError):
                return False

        await eventually(ready, START_S, lambda: "\n".join(f"--- {name}\n{self.log(name)}" for name in self.daemons))

    async def ask(self, node: str, command: str, request: str | None = None) -> Any:
        """One admin command; the result as plain values."""
        reader, writer = await asyncio.open_unix_connection(self.run_dir / f"{node}.sock")
        writer.write(msgspec.json.encode(AdminRequest(command=command, request=request)) + b"\n")
        reply = msgspec.json.decode(await reader.readline(), type=AdminReply)
        writer.close()
        await writer.wait_closed()
        assert reply.error is None, reply.error
        return reply.result

    async def complete(self, prompt: str | list[int], **body: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        status, answer = await self.post("/v1/completions", {"prompt": prompt, **body})
        assert status == 200, answer
        return answer

    async def post(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        body = {"model": "toy", "temperature": 0, **body}
        async with self.session.post(f"{self.url}{path}", json=body) as response:
            return response.status, await response.json()

    async def settled(self) -> None:
        """Nothing runs, no page is owned or quarantined, and the invariant checkers are content."""
        found: list[Any] = []

        async def zero() -> bool:
            found.clear()
            for name, daemon in self.daemons.items():
                if daemon.returncode is not None:
                    continue
                for replica in (await self.ask(name, "kv"))["replicas"]:
                    assert replica["problems"] == [], replica
                    if replica["owned"] or replica["quarantined"]:
                        found.append(replica)
                status = await self.ask(name, "status")
                found.extend(it for it in status["replicas"] if it["num_running"] or it["num_queued"])
                assert status["counters"].get("broken_invariants", 0) == 0, self.log(name)
            return not found

        await eventually(zero, SETTLE_S, lambda: str(found))

    async def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        daemon = self.daemons[name]
        if daemon.returncode is None:
            daemon.send_signal(number)
        async with asyncio.timeout(SETTLE_S):
            return await daemon.wait()

    async def end_cleanly(self) -> None:
        """Every daemon that still runs ends with 0 when told to, and none has logged a fault of its own."""
        for name, daemon in self.daemons.items():
            if daemon.returncode is None:
                assert await self.stop(name) == 0, self.log(name)
            assert "Traceback" not in self.log(name), self.log(name)

    async def close(self) -> None:
        await self.session.close()
        for daemon in self.daemons.values():
            if daemon.returncode is None:
                daemon.terminate()
        for daemon in self.daemons.values():
            try:
                async with asyncio.timeout(SETTLE_S):
                    await daemon.wait()
            except TimeoutError:
                daemon.kill()
                await daemon.wait()


async def eventually(check: Callable[[], Any], within_s: float, explain: Callable[[], str]) -> None:
    """Waits until an async condition holds: what other processes do cannot be awaited."""
    deadline_s = asyncio.get_running_loop().time() + within_s
    while not await check():
        assert asyncio.get_running_loop().time() < deadline_s, explain()
        await asyncio.sleep(0.02)


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 13 * position + position // 250) % 250 for position in range(num_tokens)]


async def text_of(cluster: Cluster, ids: list[int], max_tokens: int) -> str:
    """The whole answer of a completion that must succeed."""
    answer = await cluster.complete(ids, max_tokens=max_tokens, ignore_eos=True)
    text: str = answer["choices"][0]["text"]
    return text


async def state_of(cluster: Cluster, node: str) -> dict[str, str]:
    """State of each request that has not ended, by side."""
    rows = (await cluster.ask(node, "requests"))["requests"]
    return {row["side"]: row["state"] for row in rows if row["state"] not in ENDED}


async def wait_for_state(cluster: Cluster, state: str) -> None:
    async def reached() -> bool:
        return (await state_of(cluster, "decode0")).get("decode") == state

    await eventually(reached, 20.0, lambda: f"no request was ever seen {state}")


async def counters(cluster: Cluster, node: str = "decode0") -> dict[str, int]:
    found: dict[str, int] = (await cluster.ask(node, "status"))["counters"]
    return found


async def probe(cluster: Cluster) -> None:
    answer = await cluster.complete(prompt(40, seed=99), max_tokens=2, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 2


def children_of(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


MakeCluster = Callable[..., Any]


@pytest.fixture
def slow_toy(tmp_path: Path) -> Path:
    """A toy whose layers take long enough for a test to see a request in each state."""
    directory = tmp_path / "slow-toy"
    shutil.copytree(TOY_MODEL, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "toy_layer_seconds": 0.03}))
    return directory


@pytest.fixture
def make_cluster(tmp_path: Path) -> MakeCluster:
    """`async with make_cluster(nodes, ...) as cluster`: started, ready, and checked for leaks at the end. Nodes that
    are `absent` are started by the test, or never."""

    @asynccontextmanager
    async def make(
        nodes: dict[str, Any],
        model: Path = TOY_MODEL,
        cache: Path = tmp_path / "cache",
        absent: tuple[str, ...] = (),
        within: dict[str, list[str]] | None = None,
        **sections: Any,
    ) -> AsyncIterator[Cluster]:
        directory = Path(tempfile.mkdtemp(prefix="cluster", dir=tmp_path))
        cluster = Cluster(directory, nodes, model, cache, **sections)
        cluster.within = within or {}
        try:
            await cluster.start(*(name for name in nodes if name not in absent))
            await cluster.wait_ready()
            yield cluster
            await cluster.settled()
            await cluster.end_cleanly()
        finally:
            await cluster.close()

    return make
