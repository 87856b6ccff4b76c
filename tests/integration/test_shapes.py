"""Any prefiller shape to any decoder shape, with the toy: its text changes when a page of any rank is wrong."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from cluster import TOY_MODEL, Cluster, MakeCluster, colocated, prefill_and_decode

HANDOFF_ALL = {"local_prefill_tokens": 0}
SHAPES = [(1, 1), (1, 2), (2, 1), (1, 4), (4, 1), (2, 4), (4, 2), (3, 1), (1, 3)]


def toy(tmp_path: Path, kv_heads: int) -> Path:
    directory = tmp_path / f"toy-{kv_heads}"
    if not directory.exists():
        shutil.copytree(TOY_MODEL, directory)
        config = json.loads((directory / "config.json").read_text())
        config |= {"num_key_value_heads": kv_heads, "num_attention_heads": 12}
        (directory / "config.json").write_text(json.dumps(config))
    return directory


def shaped(prefill: dict[str, Any], decode: dict[str, Any]) -> dict[str, Any]:
    nodes = prefill_and_decode(kv_bytes="4 MiB")
    nodes["prefill0"]["replicas"][0] |= prefill
    nodes["decode0"]["replicas"][0] |= decode
    return nodes


def prompts(num: int) -> list[list[int]]:
    return [[(7 * seed + 13 * at + at // 250) % 250 for at in range(2 + 53 * seed % 300)] for seed in range(num)]


async def answers(cluster: Cluster, num: int) -> list[str]:
    asked = [cluster.complete(prompt, max_tokens=4, ignore_eos=True) for prompt in prompts(num)]
    return [answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)]


@pytest.fixture
async def expected(make_cluster: MakeCluster, tmp_path: Path, kv_heads: int) -> list[str]:
    async with make_cluster(colocated(), toy(tmp_path, kv_heads)) as cluster:
        return await answers(cluster, 12)


def fits(tp: int, kv_heads: int) -> bool:
    return kv_heads % tp == 0 or tp % kv_heads == 0


@pytest.mark.parametrize(
    ("kv_heads", "prefill_tp", "decode_tp"),
    [(heads, p, d) for heads in (2, 3, 4) for p, d in SHAPES if fits(p, heads) and fits(d, heads)],
)
async def test_tensor_parallel_shapes(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int, prefill_tp: int, decode_tp: int
) -> None:
    nodes = shaped({"parallel": {"tp": prefill_tp}}, {"parallel": {"tp": decode_tp}})
    async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL) as cluster:
        assert await answers(cluster, 12) == expected
        counters = (await cluster.ask("decode0", "status"))["counters"]
        assert counters["handoffs[arrived]"] == 12
        assert "handoffs[failed]" not in counters


@pytest.mark.parametrize("kv_heads", [2])
@pytest.mark.parametrize(("prefill_page", "decode_page"), [(16, 32), (32, 16), (16, 256), (64, 1)])
async def test_page_sizes_that_differ(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int, prefill_page: int, decode_page: int
) -> None:
    size = {"chunk_tokens": 256}
    nodes = shaped({"page_tokens": prefill_page, **size}, {"page_tokens": decode_page, "parallel": {"tp": 2}, **size})
    async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL) as cluster:
        assert await answers(cluster, 12) == expected
        # Again: now the decoder has prefixes in its cache and asks only for the rest.
        assert await answers(cluster, 12) == expected


@pytest.mark.parametrize("kv_heads", [2])
@pytest.mark.parametrize("decode", [{"dp": 2}, {"dp": 2, "tp": 2}, {"dp": 4}])
async def test_data_parallel_decoders_share_the_requests(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int, decode: dict[str, int]
) -> None:
    nodes = shaped({"parallel": {"tp": 2}}, {"parallel": decode})
    async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL) as cluster:
        assert await answers(cluster, 12) == expected
        status = await cluster.ask("decode0", "status")
        assert [replica["name"] for replica in status["replicas"]] == [f"decode0/0.{i}" for i in range(decode["dp"])]
        assert all(replica["steps"] > 0 for replica in status["replicas"])


TWO_NICS = ["127.0.0.1", "127.0.0.2"]
OVER_NICS = {"same_host": "fabric"}


async def moved(cluster: Cluster, node: str) -> dict[tuple[int, str], int]:
    """For each rank and NIC of a prefiller the bytes it has sent, of a decoder the pieces that have arrived."""
    (replica,) = (await cluster.ask(node, "status"))["replicas"]
    key = "sent_bytes" if replica["role"] == "prefill" else "arrived_pieces"
    return {(nic["rank"], nic["host"]): nic[key] for nic in replica["nics"]}


@pytest.mark.parametrize("kv_heads", [2])
@pytest.mark.parametrize("decode_nics", [TWO_NICS, TWO_NICS[:1]], ids=["2 to 2", "2 to 1"])
async def test_several_nics_carry_a_prompt(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int, decode_nics: list[str]
) -> None:
    nodes = shaped({"parallel": {"tp": 2}, "nics": [TWO_NICS, TWO_NICS]}, {"nics": [decode_nics]})
    async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL, fabric=OVER_NICS) as cluster:
        before = await moved(cluster, "prefill0")
        assert await answers(cluster, 12) == expected
        sent = {key: number - before[key] for key, number in (await moved(cluster, "prefill0")).items()}
        arrived = await moved(cluster, "decode0")
        assert list(sent) == [(0, TWO_NICS[0]), (0, TWO_NICS[1]), (1, TWO_NICS[0]), (1, TWO_NICS[1])]
        assert list(arrived) == [(0, host) for host in decode_nics]
        assert all(arrived.values())
        assert all(sent.values())
        assert "handoffs[failed]" not in (await cluster.ask("decode0", "status"))["counters"]


@pytest.mark.parametrize("kv_heads", [2])
async def test_one_nic_sends_to_two(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int
) -> None:
    nodes = shaped({}, {"parallel": {"tp": 2}, "nics": [TWO_NICS, TWO_NICS]})
    async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL, fabric=OVER_NICS) as cluster:
        assert await answers(cluster, 12) == expected
        arrived = await moved(cluster, "decode0")
        assert len(arrived) == 4
        assert all(arrived.values())


@pytest.mark.parametrize("kv_heads", [2])
async def test_one_prefiller_serves_three_decoders_and_two_prefillers_one(
    make_cluster: MakeCluster, tmp_path: Path, expected: list[str], kv_heads: int
) -> None:
    for num_prefill, num_decode in ((1, 3), (2, 1)):
        nodes = prefill_and_decode(kv_bytes="4 MiB")
        nodes["prefill0"]["replicas"] *= num_prefill
        nodes["decode0"]["replicas"] *= num_decode
        async with make_cluster(nodes, toy(tmp_path, kv_heads), handoff=HANDOFF_ALL) as cluster:
            assert await answers(cluster, 12) == expected
            for node, num in (("prefill0", num_prefill), ("decode0", num_decode)):
                replicas = (await cluster.ask(node, "status"))["replicas"]
                assert len(replicas) == num
                assert all(replica["steps"] > 0 for replica in replicas)


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2])
async def test_128_requests_at_once_over_a_mismatch(make_cluster: MakeCluster, tmp_path: Path, kv_heads: int) -> None:
    model = toy(tmp_path, kv_heads)
    async with make_cluster(colocated(), model) as cluster:
        expected = await answers(cluster, 128)
    nodes = shaped({"parallel": {"tp": 2}}, {"parallel": {"tp": 1}})
    async with make_cluster(nodes, model, handoff=HANDOFF_ALL) as cluster:
        assert await answers(cluster, 128) == expected


async def test_shapes_that_cannot_work_are_refused_with_both_numbers(tmp_path: Path) -> None:
    nodes = shaped({"parallel": {"tp": 2}}, {})
    cluster = Cluster(tmp_path, nodes, toy(tmp_path, 3), tmp_path / "cache")
    try:
        await cluster.start("prefill0")
        assert await cluster.daemons["prefill0"].wait() == 4
        assert "tp 2 and 3 KV heads" in cluster.log("prefill0")
    finally:
        await cluster.close()
