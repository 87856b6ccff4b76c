"""Stuck, killed and restarted processes on real daemons: what clients see of it, and what is left behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import (
    HANDOFF_ALL,
    TOY_MODEL,
    Cluster,
    MakeCluster,
    children_of,
    colocated,
    counters,
    eventually,
    free_ports,
    prefill_and_decode,
    probe,
    prompt,
    state_of,
    text_of,
    wait_for_state,
)

LEASE_S = 2.0


def two_decoders(**replica: Any) -> dict[str, Any]:
    """A prefiller, a decoder that serves HTTP, and another one that does not."""
    nodes = prefill_and_decode(**replica)
    [control] = free_ports(1)
    nodes["decode1"] = {"control_port": control, "replicas": list(nodes["decode0"]["replicas"])}
    return nodes


def num_descriptors(cluster: Cluster, node: str) -> int:
    """Without those of HTTP clients, which come and go."""
    port = f":{cluster.nodes[node].get('http', {}).get('port', 0):04X}"
    rows = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()]
    clients = {f"socket:[{row[9]}]" for row in rows if row[1].endswith(port)}
    targets = [os.readlink(it) for it in Path(f"/proc/{cluster.daemons[node].pid}/fd").iterdir()]
    return len([target for target in targets if target not in clients])


async def wait_for_replica(cluster: Cluster, node: str, state: str) -> None:
    async def reached() -> bool:
        return bool([it for it in (await cluster.ask(node, "status"))["replicas"] if it["state"] == state])

    await eventually(reached, 30.0, lambda: cluster.log(node))


async def replaced(cluster: Cluster, node: str, executor: int, before: int) -> None:
    """Until another executor serves in its place, and the node has as many descriptors as `before`."""
    await wait_for_replica(cluster, node, "ready")
    await cluster.wait_ready()
    assert children_of(cluster.daemons[node].pid) != [executor]
    await probe(cluster)
    await cluster.settled()
    assert num_descriptors(cluster, node) == before


@pytest.mark.parametrize("node", ["prefill0", "decode0"])
async def test_a_stuck_executor_is_replaced(make_cluster: MakeCluster, slow_toy: Path, node: str) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL, limits={"step_s": 2.0}) as cluster:
        await probe(cluster)
        daemon = cluster.daemons[node].pid
        [executor] = children_of(daemon)
        before = num_descriptors(cluster, node)
        answer = asyncio.create_task(
            cluster.post("/v1/completions", {"prompt": prompt(600), "max_tokens": 30, "ignore_eos": True})
        )
        await wait_for_state(cluster, "prefilling" if node == "prefill0" else "decoding")
        os.kill(executor, signal.SIGSTOP)
        await wait_for_replica(cluster, node, "failed")
        assert "took longer than limits.step_s" in (await cluster.ask(node, "status"))["replicas"][0]["reason"]
        status, body = await answer
        if node == "prefill0":
            assert status == 200, body
        else:
            assert (status, body["error"]["code"]) == (503, "replica_failed")
        await replaced(cluster, node, executor, before)


@pytest.mark.parametrize("node", ["prefill0", "decode0"])
async def test_an_executor_that_is_stuck_between_steps_is_replaced(make_cluster: MakeCluster, node: str) -> None:
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL, limits={"answer_s": 1.0}) as cluster:
        await probe(cluster)
        await cluster.settled()
        daemon = cluster.daemons[node].pid
        [executor] = children_of(daemon)
        before = num_descriptors(cluster, node)
        os.kill(executor, signal.SIGSTOP)
        await wait_for_replica(cluster, node, "failed")
        state = await cluster.ask(node, "status")
        assert not state["ready"]
        assert f"stuck (pid {executor})" in state["reason"]
        assert "limits.answer_s" in state["reason"]
        await replaced(cluster, node, executor, before)


async def test_an_executor_that_hangs_while_it_loads_is_replaced(make_cluster: MakeCluster) -> None:
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL, limits={"load_s": 3.0}) as cluster:
        await probe(cluster)
        await cluster.settled()
        before = num_descriptors(cluster, "prefill0")
        [executor] = children_of(cluster.daemons["prefill0"].pid)
        [config] = cluster.cache.rglob("config.json")
        content = config.read_bytes()
        config.unlink()
        os.mkfifo(config)  # whoever opens it waits for a writer
        os.kill(executor, signal.SIGKILL)

        async def given_up() -> bool:
            return "limits.load_s" in (await cluster.ask("prefill0", "status"))["reason"]

        await eventually(given_up, 30.0, lambda: cluster.log("prefill0"))
        config.unlink()
        config.write_bytes(content)
        await wait_for_replica(cluster, "prefill0", "ready")
        await cluster.wait_ready()
        await probe(cluster)
        await cluster.settled()
        assert num_descriptors(cluster, "prefill0") == before


async def test_requests_of_a_lost_decoder_that_nobody_has_seen_anything_of_move(
    make_cluster: MakeCluster, slow_toy: Path
) -> None:
    async with make_cluster(colocated(), TOY_MODEL) as cluster:
        expected = [await text_of(cluster, prompt(400, seed), 4) for seed in range(6)]
    async with make_cluster(two_decoders(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answers = [asyncio.create_task(text_of(cluster, prompt(400, seed), 4)) for seed in range(6)]

        async def has_some() -> bool:
            return "decode" in await state_of(cluster, "decode1")

        await eventually(has_some, 20.0, lambda: "the other decoder got none")
        cluster.daemons["decode1"].kill()
        assert await asyncio.gather(*answers) == expected
        counted = await counters(cluster)
        assert counted["requests_moved[no_path]"] >= 1
        rows = (await cluster.ask("decode0", "requests"))["requests"]
        moved = next(row["request"] for row in rows if row["request"].endswith("~1"))
        [story] = (await cluster.ask("decode0", "story", moved))["stories"]
        assert "decode1/0 had it before: the link to decode node decode1 was lost" in story["lines"][0]["reason"]
        await cluster.daemons["decode1"].wait()


async def test_a_failed_replica_hands_its_requests_to_another_one_of_the_same_node(
    make_cluster: MakeCluster, slow_toy: Path
) -> None:
    nodes = prefill_and_decode()
    nodes["decode0"]["replicas"] *= 2
    async with make_cluster(nodes, slow_toy, handoff=HANDOFF_ALL) as cluster:
        answers = [asyncio.create_task(text_of(cluster, prompt(400, seed), 4)) for seed in range(6)]

        async def both_busy() -> bool:
            replicas = (await cluster.ask("decode0", "status"))["replicas"]
            return all(replica["num_running"] for replica in replicas)

        await eventually(both_busy, 20.0, lambda: "both replicas never had some each")
        os.kill(children_of(cluster.daemons["decode0"].pid)[0], signal.SIGKILL)
        await asyncio.gather(*answers)
        assert (await counters(cluster))["requests_moved[replica_failed]"] >= 1
        await cluster.wait_ready()


@pytest.mark.parametrize("streams", [True, False])
async def test_only_what_clients_have_not_got_yet_is_asked_again(
    make_cluster: MakeCluster, slow_toy: Path, streams: bool
) -> None:
    """Every request has tokens. Those that stream cannot begin anew; the others are answered as if nothing was."""
    async with make_cluster(colocated(), TOY_MODEL) as cluster:
        expected = [await text_of(cluster, prompt(100, seed), 50) for seed in range(6)]
    nodes = prefill_and_decode()
    nodes["decode0"]["replicas"] *= 2
    async with make_cluster(nodes, slow_toy, handoff=HANDOFF_ALL) as cluster:

        async def ask(seed: int) -> str:
            """The text that came, all of it or a part."""
            body = {"model": "toy", "temperature": 0, "prompt": prompt(100, seed), "max_tokens": 50}
            if not streams:
                return await text_of(cluster, prompt(100, seed), 50)
            body |= {"ignore_eos": True, "stream": True}
            async with cluster.session.post(f"{cluster.url}/v1/completions", json=body) as response:
                lines = [line async for line in response.content if line.startswith(b"data: {")]
            chunks = [json.loads(line.removeprefix(b"data: ")) for line in lines]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks if "error" not in chunk)

        answers = [asyncio.create_task(ask(seed)) for seed in range(6)]

        async def all_have_tokens() -> bool:
            rows = (await cluster.ask("decode0", "requests"))["requests"]
            return len([row for row in rows if row["side"] == "decode" and row["output_tokens"]]) == 6

        await eventually(all_have_tokens, 20.0, lambda: cluster.log("decode0"))
        os.kill(children_of(cluster.daemons["decode0"].pid)[0], signal.SIGKILL)
        texts = await asyncio.gather(*answers)
        num_moved = (await counters(cluster)).get("requests_moved[replica_failed]", 0)
        if streams:
            assert num_moved == 0
            assert all(whole.startswith(text) for text, whole in zip(texts, expected, strict=True))
            assert texts != expected
        else:
            assert num_moved > 0
            assert texts == expected
        await cluster.wait_ready()


async def test_verified_handoffs_between_other_shapes(make_cluster: MakeCluster) -> None:
    nodes = prefill_and_decode()
    nodes["prefill0"]["replicas"][0].update(parallel={"tp": 2}, page_tokens=32)
    async with make_cluster(colocated(), TOY_MODEL) as cluster:
        expected = [await text_of(cluster, prompt(200, seed), 4) for seed in range(4)]
    async with make_cluster(nodes, handoff={**HANDOFF_ALL, "verify": "pages"}) as cluster:
        assert await asyncio.gather(*(text_of(cluster, prompt(200, seed), 4) for seed in range(4))) == expected
        counted = await counters(cluster)
        assert counted["handoffs[arrived]"] == 4
        assert "handoffs[corrupt]" not in counted


async def test_waiting_in_line_counts_towards_the_deadline(make_cluster: MakeCluster, slow_toy: Path) -> None:
    nodes, limits = prefill_and_decode(max_sequences=1), {"timeout_s": 1.5}
    async with make_cluster(nodes, slow_toy, handoff=HANDOFF_ALL, limits=limits) as cluster:
        body = {"prompt": prompt(100), "max_tokens": 500, "ignore_eos": True}
        answers = await asyncio.gather(*(cluster.post("/v1/completions", body) for _ in range(2)))
        assert [status for status, _ in answers] == [408, 408]
        assert any("it was queued" in answer["error"]["message"] for _, answer in answers)


async def test_a_full_prefiller_is_nobodys_fault(make_cluster: MakeCluster, slow_toy: Path) -> None:
    nodes = prefill_and_decode()
    nodes["prefill0"]["replicas"][0]["max_sequences"] = 1
    handoff = {**HANDOFF_ALL, "on_failure": "error"}
    async with make_cluster(nodes, slow_toy, handoff=handoff, limits={"max_queue": 0}) as cluster:
        answer = asyncio.create_task(cluster.complete(prompt(600), max_tokens=1))
        await wait_for_state(cluster, "prefilling")
        body = {"model": "toy", "prompt": prompt(300, seed=1), "max_tokens": 1}
        async with cluster.session.post(f"{cluster.url}/v1/completions", json=body) as response:
            assert (response.status, (await response.json())["error"]["code"]) == (429, "queue_full")
            assert int(response.headers["Retry-After"]) >= 1
        await answer


async def test_a_short_prompt_does_not_wait_for_long_ones(make_cluster: MakeCluster, slow_toy: Path) -> None:
    async with make_cluster(colocated(chunk_tokens=64), slow_toy) as cluster:
        long = [asyncio.create_task(text_of(cluster, prompt(1500, seed), 1)) for seed in range(3)]

        async def busy() -> bool:
            return bool((await cluster.ask("node0", "status"))["replicas"][0]["num_running"] == 3)

        await eventually(busy, 20.0, lambda: cluster.log("node0"))
        await text_of(cluster, prompt(20, seed=7), 1)
        assert not any(answer.done() for answer in long)
        await asyncio.gather(*long)


async def pdctl(cluster: Cluster, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "pdd.control.main", *arguments, "--topology", str(cluster.file),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    output, _ = await process.communicate()
    assert process.returncode is not None
    return process.returncode, output.decode()


async def test_drain_waits_for_what_runs(make_cluster: MakeCluster, slow_toy: Path) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answer = asyncio.create_task(text_of(cluster, prompt(300), 20))
        await wait_for_state(cluster, "decoding")
        drained = asyncio.create_task(pdctl(cluster, "drain", "--wait", "--node", "decode0"))

        async def draining() -> bool:
            return bool((await cluster.ask("decode0", "status"))["draining"])

        await eventually(draining, 20.0, lambda: "never draining")
        status, body = await cluster.post("/v1/completions", {"prompt": prompt(40), "max_tokens": 1})
        assert (status, body["error"]["code"]) == (503, "no_path")
        code, output = await drained
        assert code == 0, output
        assert "unfinished" in output
        assert answer.done()
        await answer
        assert (await pdctl(cluster, "resume", "--node", "decode0"))[0] == 0
        await probe(cluster)


async def test_a_rolling_restart_costs_no_request(make_cluster: MakeCluster) -> None:
    async with make_cluster(two_decoders(), handoff=HANDOFF_ALL) as cluster:
        done = asyncio.Event()
        statuses: list[int] = []

        async def client(number: int) -> None:
            rng = random.Random(number)
            while not done.is_set():
                ids = [rng.randrange(250) for _ in range(60 + 20 * number)]
                body = {"prompt": ids, "max_tokens": 8, "ignore_eos": True}
                status, answer = await cluster.post("/v1/completions", body)
                assert status == 200, answer
                statuses.append(status)

        clients = [asyncio.create_task(client(number)) for number in range(4)]
        for _ in range(3):
            for node in ("prefill0", "decode1"):
                before = len(statuses)
                code, output = await pdctl(cluster, "drain", "--wait", "--node", node)
                assert code == 0, output
                assert await cluster.stop(node) == 0
                await cluster.start(node)
                await cluster.wait_ready()

                async def served(enough: int = before + 10) -> bool:
                    return len(statuses) >= enough or any(it.done() for it in clients)

                await eventually(served, 30.0, lambda: "the load came to a halt")
        done.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        assert (await counters(cluster))["handoffs[arrived]"] > 0


async def test_a_killed_decoder_frees_the_prefillers_pages_within_a_lease(
    make_cluster: MakeCluster, slow_toy: Path
) -> None:
    handoff = {**HANDOFF_ALL, "lease_s": LEASE_S}
    async with make_cluster(two_decoders(), slow_toy, handoff=handoff) as cluster:
        answers = [asyncio.create_task(text_of(cluster, prompt(400, seed), 1)) for seed in range(4)]

        async def owned() -> int:
            [replica] = (await cluster.ask("prefill0", "kv"))["replicas"]
            return int(replica["owned"])

        async def has_some() -> bool:
            return await owned() > 0

        async def has_none() -> bool:
            return await owned() == 0

        await eventually(has_some, 10.0, lambda: "the prefiller had nothing to do")
        for node in ("decode0", "decode1"):
            cluster.daemons[node].kill()
        await eventually(has_none, LEASE_S + 1.0, lambda: cluster.log("prefill0"))
        await asyncio.gather(*answers, return_exceptions=True)
        for node in ("decode0", "decode1"):
            await cluster.daemons[node].wait()
