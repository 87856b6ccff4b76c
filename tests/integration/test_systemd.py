"""The units under a real systemd: started, killed, refused and stopped as on a host."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest
from cluster import HANDOFF_ALL, eventually, prefill_and_decode, prompt
from systemd_host import NoSystemd, SystemdHost, systemd_host

NODES = ("pdd@prefill0", "pdd@decode0")
START_S = 60.0


@pytest.fixture(scope="module")
def nodes() -> dict[str, Any]:
    return prefill_and_decode()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, nodes: dict[str, Any]) -> Iterator[SystemdHost]:
    topology = {
        "version": 1,
        "cluster": {"name": "test", "key_file": "cluster.key"},
        "model": {"name": "toy", "path": "toy-model"},
        "handoff": HANDOFF_ALL,
        "nodes": nodes,
    }
    try:
        with systemd_host(tmp_path_factory.mktemp("systemd"), topology) as found:
            yield found
    except NoSystemd as reason:
        pytest.skip(str(reason))


async def status_says(host: SystemdHost, unit: str, text: str) -> None:
    def found() -> bool:
        return text in host.show(unit)["StatusText"]

    async def says() -> bool:
        return await asyncio.to_thread(found)

    await eventually(says, START_S, lambda: str(host.show(unit)))


async def complete(nodes: dict[str, Any], ids: list[int]) -> None:
    url = f"http://127.0.0.1:{nodes['decode0']['http']['port']}/v1/completions"
    body = {"model": "toy", "prompt": ids, "max_tokens": 4, "ignore_eos": True}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
        assert response.status == 200, await response.text()
        assert (await response.json())["usage"]["completion_tokens"] == 4


async def test_nodes_start_serve_come_back_and_stop(host: SystemdHost, nodes: dict[str, Any]) -> None:
    host.run("systemctl", "start", "pdd.target", *NODES)
    await status_says(host, "pdd@decode0", "serving, prefill and decode apart")
    await complete(nodes, prompt(200))
    shown = host.run("/opt/pdd/.venv/bin/pdctl", "status", "--topology", "/etc/pdd/topology.yaml").stdout
    assert "handoffs[arrived]" in shown

    first = host.show("pdd@decode0")
    assert host.run("stat", "-c", "%U", f"/proc/{first['MainPID']}").stdout == "pdd\n"
    host.run("kill", "-KILL", first["MainPID"])
    await eventually(lambda: restarted(host), START_S, lambda: str(host.show("pdd@decode0")))
    await status_says(host, "pdd@decode0", "serving, prefill and decode apart")
    await complete(nodes, prompt(200, seed=1))

    host.run("systemctl", "stop", "pdd.target")

    async def stopped() -> bool:
        return all(host.show(unit)["ActiveState"] == "inactive" for unit in NODES)

    await eventually(stopped, START_S, lambda: str([host.show(unit) for unit in NODES]))
    assert [host.show(unit)["Result"] for unit in NODES] == ["success", "success"]


async def restarted(host: SystemdHost) -> bool:
    shown = host.show("pdd@decode0")
    return shown["NRestarts"] == "1" and shown["ActiveState"] == "active"


async def test_a_topology_that_is_refused_is_not_tried_again(host: SystemdHost) -> None:
    host.run("sed", "-i", "s/role: decode/role: banana/", "/etc/pdd/topology.yaml")
    done = host.run("systemctl", "start", "pdd@decode0", check=False)
    assert done.returncode
    await asyncio.sleep(3.0)  # longer than RestartSec
    shown = host.show("pdd@decode0")
    assert (shown["ActiveState"], shown["ExecMainStatus"], shown["NRestarts"]) == ("failed", "4", "0")
