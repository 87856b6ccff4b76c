"""Two daemons of one machine: how pages go from one to the other, and where an operator sees it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from cluster import HANDOFF_ALL, Cluster, MakeCluster, counters, prefill_and_decode, prompt

from pdd.control import commands

WAYS = {"copy": "copy", "fabric": "1 of 1 paths"}


async def text_of(cluster: Cluster, node: str, command: Any) -> str:
    sockets = {node: cluster.run_dir / f"{node}.sock"}
    text: str = (await asyncio.to_thread(command, sockets)).text
    return text


@pytest.mark.parametrize("same_host", WAYS)
async def test_the_way_of_the_topology_is_taken_and_shown(make_cluster: MakeCluster, same_host: str) -> None:
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL, fabric={"same_host": same_host}) as cluster:
        await cluster.complete(prompt(200), max_tokens=2, ignore_eos=True)
        assert (await counters(cluster))["handoffs[arrived]"] == 1
        assert WAYS[same_host] in await text_of(cluster, "prefill0", commands.peers)
        [source] = (await cluster.ask("prefill0", "status"))["replicas"]
        [target] = (await cluster.ask("decode0", "status"))["replicas"]
        arrived = sum(nic["arrived_pieces"] for nic in target["nics"])
        assert (target["copied_bytes"] > 0, arrived > 0) == (same_host == "copy", same_host == "fabric")
        assert not any(nic["failed_paths"] for replica in (source, target) for nic in replica["nics"])
        async with cluster.session.get(f"{cluster.url}/metrics") as response:
            metrics = await response.text()
        assert f'pdd:fabric{{kind="copied_bytes",replica="decode0/0"}} {target["copied_bytes"]:.1f}' in metrics
        assert 'pdd:fabric{kind="unknown",replica="decode0/0"} 0.0' in metrics
        copied = f"{target['copied_bytes'] / 2**20:.1f} MiB"
        assert (copied in await text_of(cluster, "decode0", commands.status)) == (same_host == "copy")
