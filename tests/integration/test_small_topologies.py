"""The small twins of the published deployments, with tiny real models: each gives the tokens of one colocated rank."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster import Cluster, MakeCluster, colocated, free_ports
from tiny_models import make

TOPOLOGIES = Path(__file__).parents[2] / "topology"
PROMPTS = [[(11 * seed + 7 * at) % 256 for at in range(3 + 31 * seed)] for seed in range(8)]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    make(directory)
    return directory


def small(name: str) -> tuple[dict[str, Any], str]:
    """The nodes of a topology file on ports that are free here, and its model's name."""
    topology = yaml.safe_load((TOPOLOGIES / f"{name}.yaml").read_text())
    for node in topology["nodes"].values():
        node["control_port"], http = free_ports(2)
        if "http" in node:
            node["http"] = {"port": http}
    return topology["nodes"], topology["model"]["name"]


async def answers(cluster: Cluster) -> list[str]:
    asked = [cluster.complete(prompt, max_tokens=6, ignore_eos=True) for prompt in PROMPTS]
    return [answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)]


@pytest.mark.parametrize("name", ["small-deepseek-tp", "small-deepseek-dp-ep", "small-qwen3-moe-1p3d"])
async def test_every_shape_gives_the_tokens_of_one_rank(make_cluster: MakeCluster, models: Path, name: str) -> None:
    nodes, model = small(name)
    async with make_cluster(colocated(), models / model) as cluster:
        expected = await answers(cluster)
    async with make_cluster(nodes, models / model, handoff={"local_prefill_tokens": 0}) as cluster:
        assert await answers(cluster) == expected
        handed_off = 0
        for node in (node for node in nodes if node.startswith("decode")):
            counters = (await cluster.ask(node, "status"))["counters"]
            handed_off += counters.get("handoffs[arrived]", 0)
            assert "handoffs[failed]" not in counters
        assert handed_off == len(PROMPTS)
