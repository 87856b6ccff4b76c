"""Requests through real daemons with the toy model, whose text changes when one byte of KV is wrong or misplaced."""

from __future__ import annotations

import asyncio

import pytest
from cluster import HANDOFF_ALL, Cluster, MakeCluster, colocated, counters, free_ports, prefill_and_decode


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return [(7 * seed + 13 * position) % 250 for position in range(num_tokens)]


async def tokens_of(cluster: Cluster, ids: list[int], max_tokens: int = 8) -> str:
    answer = await cluster.complete(ids, max_tokens=max_tokens, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == max_tokens
    return str(answer["choices"][0]["text"])


@pytest.fixture(params=["tcp", "shm"])
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("page_tokens", [16, 256])
async def test_a_handed_off_prompt_is_continued_like_a_colocated_one(
    make_cluster: MakeCluster, provider: str, page_tokens: int
) -> None:
    lengths = sorted({1, 2, page_tokens - 1, page_tokens, page_tokens + 1, 3 * page_tokens + 5, 700})
    sizes = {"page_tokens": page_tokens, "chunk_tokens": max(64, page_tokens)}
    async with make_cluster(colocated(**sizes)) as cluster:
        expected = [await tokens_of(cluster, prompt(length, seed=length)) for length in lengths]
    nodes = prefill_and_decode(**sizes)
    handoff = {"local_prefill_tokens": 0}
    async with make_cluster(nodes, handoff=handoff, fabric={"provider": provider}) as cluster:
        answers = [await tokens_of(cluster, prompt(length, seed=length)) for length in lengths]
        assert answers == expected
        counters = (await cluster.ask("decode0", "status"))["counters"]
        assert counters["handoffs[arrived]"] == len([length for length in lengths if length > 1])
        assert "prefill_decisions[decoder,recompute]" not in counters


async def test_a_burst_is_spread_over_the_prefillers(make_cluster: MakeCluster) -> None:
    """Within one heartbeat, so that nothing is heard of what they have been asked to do. Prompts begin alike: where
    loads are equal, all would go to the same one."""
    nodes = prefill_and_decode(max_sequences=16)
    nodes["prefill1"] = {**nodes["prefill0"], "control_port": free_ports(1)[0]}
    cluster_section = {"heartbeat_s": 30.0, "silence_s": 120.0}
    async with make_cluster(nodes, handoff=HANDOFF_ALL, cluster=cluster_section) as cluster:
        prompts = [prompt(64) + prompt(60, seed) for seed in range(12)]
        await asyncio.gather(*[tokens_of(cluster, ids) for ids in prompts])
        nodes_counted = [await counters(cluster, name) for name in ("prefill0", "prefill1")]
    sent = [counted.get("requests_ended[prefill,sent]", 0) for counted in nodes_counted]
    assert sum(sent) == len(prompts)
    assert min(sent) >= 4, sent


async def test_many_requests_at_once_each_get_their_own_answer(make_cluster: MakeCluster) -> None:
    prompts = [prompt(5 + 37 * seed % 400, seed) for seed in range(40)]
    async with make_cluster(colocated()) as cluster:
        expected = await asyncio.gather(*[tokens_of(cluster, ids) for ids in prompts])
    async with make_cluster(prefill_and_decode(max_sequences=8)) as cluster:
        assert await asyncio.gather(*[tokens_of(cluster, ids) for ids in prompts]) == expected
        # Again, now that both sides find prefixes in their caches.
        assert await asyncio.gather(*[tokens_of(cluster, ids) for ids in prompts]) == expected
