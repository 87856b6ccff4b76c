"""Daemons that the system, or whoever started them, leaves without something: a reader of their logs, descriptors."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    HANDOFF_ALL,
    MakeCluster,
    children_of,
    counters,
    eventually,
    prefill_and_decode,
    probe,
    prompt,
    wait_for_state,
)


def sh(script: str) -> list[str]:
    """A command that is put before a daemon's own."""
    return ["bash", "-c", f'{script} exec "$0" "$@"']


def of_process(pid: int, name: str) -> str:
    """What the system says of it; nothing when it is gone."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text()
    except FileNotFoundError:
        return ""


def full_pipe(path: Path) -> int:
    """A named pipe that takes no more; the descriptor of its reader, who does not read."""
    os.mkfifo(path)
    fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(fd, b"x" * 4096)
    return fd


@pytest.mark.parametrize("stderr", ["/dev/full", "pipe"])
async def test_logs_that_go_nowhere_stop_nothing(make_cluster: MakeCluster, tmp_path: Path, stderr: str) -> None:
    reader = full_pipe(tmp_path / "pipe")
    to = str(tmp_path / "pipe") if stderr == "pipe" else stderr
    within = {node: sh(f"exec 2>{to};") for node in ("prefill0", "decode0")}
    async with make_cluster(prefill_and_decode(), within=within, handoff=HANDOFF_ALL) as cluster:
        await probe(cluster)
        await cluster.stop("prefill0", signal.SIGKILL)  # the decoder has a link to give up, in the middle of a turn
        await cluster.start("prefill0")
        await cluster.wait_ready()
        await probe(cluster)
        lost = (await counters(cluster)).get("log_lines_lost", 0)
        assert (lost > 0) is (stderr == "/dev/full")
        heard = ""
        while stderr == "pipe" and heard.count("side=decode state=finished") < 2:
            try:
                heard += os.read(reader, 1 << 16).decode()
            except BlockingIOError:
                await asyncio.sleep(0.01)
    os.close(reader)


async def test_the_soft_limit_on_descriptors_is_raised(make_cluster: MakeCluster) -> None:
    within = {"decode0": sh("ulimit -Sn 100; ulimit -Hn 500;")}
    async with make_cluster(prefill_and_decode(), within=within) as cluster:
        assert re.search(r"Max open files +500 +500 ", of_process(cluster.daemons["decode0"].pid, "limits"))


@asynccontextmanager
async def idle_clients(url: str) -> AsyncIterator[list[Any]]:
    """Function to connect more of them."""
    port = int(url.rpartition(":")[2])
    async with AsyncExitStack() as stack:
        clients = []
        for _ in range(150):
            client = stack.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(("127.0.0.1", port))
            clients.append(client)
        yield clients


async def test_a_replica_comes_back_when_there_are_descriptors_again(make_cluster: MakeCluster) -> None:
    within = {"decode0": sh("ulimit -n 100;")}
    async with make_cluster(prefill_and_decode(), within=within, handoff=HANDOFF_ALL) as cluster:
        await probe(cluster)
        daemon = cluster.daemons["decode0"].pid

        async def exhausted() -> bool:
            return len(os.listdir(f"/proc/{daemon}/fd")) >= 100

        async def given_up() -> bool:
            return bool(cluster.log("decode0").count("replica down") >= 2)

        async with idle_clients(cluster.url):
            await eventually(exhausted, 20.0, lambda: "there are still descriptors")
            os.kill(children_of(daemon)[0], signal.SIGKILL)
            await eventually(given_up, 20.0, lambda: cluster.log("decode0"))
            assert "decode0/0 cannot start: Too many open files" in cluster.log("decode0")
        await cluster.wait_ready()
        await probe(cluster)


async def test_a_start_with_too_few_descriptors_says_so(make_cluster: MakeCluster) -> None:
    async with make_cluster(prefill_and_decode()) as cluster:
        assert await cluster.stop("decode0") == 0
        cluster.within["decode0"] = sh("ulimit -n 10;")
        await cluster.start("decode0")
        assert await cluster.daemons["decode0"].wait() == 1
        assert "pdd: this process may open 10 files, a daemon needs 64" in cluster.log("decode0")


async def pdctl(cluster: Any, *arguments: str) -> tuple[int | None, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "import sys; from pdd.control.main import main; sys.exit(main())",
        *arguments, "--topology", str(cluster.file), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    return process.returncode, output.decode()


async def test_a_stopping_node_is_not_resumed_and_counts_a_request_once(
    make_cluster: MakeCluster, slow_toy: Path
) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        body = {"prompt": prompt(60), "max_tokens": 20, "ignore_eos": True}
        answer = asyncio.create_task(cluster.post("/v1/completions", body))
        await wait_for_state(cluster, "decoding")
        assert (await cluster.ask("decode0", "status"))["unfinished"] == 1
        cluster.daemons["decode0"].send_signal(signal.SIGTERM)

        async def draining() -> bool:
            return bool((await cluster.ask("decode0", "status"))["draining"])

        await eventually(draining, 20.0, lambda: "never draining")
        code, output = await pdctl(cluster, "resume", "--node", "decode0")
        assert code == 1
        assert "is stopping" in output
        assert (await cluster.ask("decode0", "status"))["draining"]
        assert (await answer)[0] == 200
        assert await cluster.daemons["decode0"].wait() == 0


async def test_systemd_hears_how_a_node_serves(
    make_cluster: MakeCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setenv("WATCHDOG_USEC", "300000")
        async with make_cluster(prefill_and_decode()) as cluster:
            for command, status in (("drain", b"draining: no new"), ("resume", b"serving, prefill and decode apart")):
                await cluster.ask("decode0", command)
                async with asyncio.timeout(20.0):
                    heard = b""
                    while not heard.startswith(b"STATUS=" + status):
                        heard = await asyncio.get_running_loop().sock_recv(systemd, 1000)
            systemd.close()  # and nobody hears the end: it does no harm


async def test_a_stopped_executor_does_not_outlive_its_daemon(make_cluster: MakeCluster) -> None:
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL) as cluster:
        [executor] = children_of(cluster.daemons["prefill0"].pid)
        os.kill(executor, signal.SIGSTOP)
        await cluster.stop("prefill0", signal.SIGKILL)

        async def gone() -> bool:
            return of_process(executor, "status") == "" or "State:\tZ" in of_process(executor, "status")

        try:
            await eventually(gone, 20.0, lambda: "it is still there")
        finally:
            if not await gone():
                os.kill(executor, signal.SIGKILL)
        await cluster.start("prefill0")
        await cluster.wait_ready()


async def test_an_interrupt_while_a_daemon_is_imported_leaves_no_traceback() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdd", "daemon", "--topology", "none", "--node", "none", stderr=asyncio.subprocess.PIPE
    )

    async def importing() -> bool:
        return "msgspec" in of_process(process.pid, "maps")

    await eventually(importing, 20.0, lambda: "it imports nothing")
    process.send_signal(signal.SIGINT)
    _, said = await process.communicate()
    assert said == b""
    assert process.returncode == -signal.SIGINT
