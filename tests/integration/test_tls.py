"""Two real daemons whose control links are encrypted, and what they say when their certificates do not fit."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import yaml
from certificates import make_authority, make_certificate
from cluster import HANDOFF_ALL, SETTLE_S, TOY_MODEL, Cluster, MakeCluster, eventually, prefill_and_decode

PROMPT = list(range(100))

pytestmark = pytest.mark.timeout(200)


def files(tls: msgspec.Struct) -> dict[str, str]:
    return {name: str(path) for name, path in msgspec.structs.asdict(tls).items()}


async def test_a_handoff_over_encrypted_links_gives_the_same_tokens(
    make_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("certificates")
    tls = files(make_certificate(directory, "node", make_authority(directory)))
    answers = []
    for cluster_section in ({}, {"tls": tls}):
        async with make_cluster(prefill_and_decode(), TOY_MODEL, handoff=HANDOFF_ALL, cluster=cluster_section) as one:
            answers.append((await one.complete(PROMPT, max_tokens=8))["choices"][0]["text"])
            assert (await one.ask("decode0", "status"))["counters"]["handoffs[arrived]"] == 1
    assert answers[0] == answers[1]


async def test_a_node_of_another_authority_is_refused_and_pdctl_says_why(
    make_cluster: MakeCluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("certificates")
    ours = make_certificate(directory, "node", make_authority(directory))
    strange = make_certificate(directory, "stranger", make_authority(directory, "other"))
    async with make_cluster(prefill_and_decode(), TOY_MODEL, cluster={"tls": files(ours)}) as cluster:
        await restart_with(cluster, "decode0", files(strange))

        async def refused() -> bool:
            (dialed,) = (await cluster.ask("decode0", "peers"))["peers"]
            (awaited,) = (await cluster.ask("prefill0", "peers"))["peers"]
            return (
                dialed["state"] == "refused"
                and "certificate is not accepted" in dialed["reason"]
                and "the peer does not accept this node's certificate" in awaited["reason"]
            )

        async def listening() -> bool:
            return (cluster.run_dir / "decode0.sock").exists()

        await eventually(listening, SETTLE_S, lambda: cluster.log("decode0"))
        await eventually(refused, SETTLE_S, lambda: cluster.log("prefill0"))


async def restart_with(cluster: Cluster, node: str, tls: dict[str, Any]) -> None:
    daemon = cluster.daemons[node]
    daemon.terminate()
    await daemon.wait()
    topology = yaml.safe_load(cluster.file.read_text())
    topology["cluster"]["tls"] = tls
    cluster.file.write_text(yaml.safe_dump(topology))
    await cluster.start(node)
