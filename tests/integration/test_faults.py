"""What goes wrong on real daemons: cancels in every state, killed and stopped processes, strangers at the ports.

After every test `make_cluster` checks that all pages are back, nothing runs, and no invariant is broken.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import aiohttp
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


async def stream(cluster: Cluster, ids: list[int], max_tokens: int) -> None:
    body = {"model": "toy", "prompt": ids, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    async with cluster.session.post(f"{cluster.url}/v1/completions", json=body) as response:
        async for _ in response.content:
            pass


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_a_client_that_leaves_gives_everything_back(
    make_cluster: MakeCluster, slow_toy: Path, state: str
) -> None:
    async with make_cluster(prefill_and_decode(max_sequences=1), slow_toy, handoff=HANDOFF_ALL) as cluster:
        blocker = asyncio.create_task(stream(cluster, prompt(600, seed=1), 400)) if state == "queued" else None
        if blocker:
            await wait_for_state(cluster, "prefilling")
        client = asyncio.create_task(stream(cluster, prompt(600), 400))
        if state == "queued":

            async def waits() -> bool:
                return bool((await cluster.ask("decode0", "status"))["replicas"][0]["num_queued"])

            await eventually(waits, 20.0, lambda: "the second request never waited")
        else:
            await wait_for_state(cluster, state)
        for task in (client, blocker):
            if task:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        await cluster.settled()
        assert (await counters(cluster))["requests_ended[decode,cancelled]"] == 1 + (blocker is not None)
        await probe(cluster)


@pytest.mark.parametrize("node", ["decode0", "prefill0"])
async def test_an_operator_cancels_on_either_side(make_cluster: MakeCluster, slow_toy: Path, node: str) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answer = asyncio.create_task(
            cluster.post("/v1/completions", {"prompt": prompt(600), "max_tokens": 4, "ignore_eos": True})
        )
        await wait_for_state(cluster, "prefilling")

        async def seen() -> bool:
            return bool(await state_of(cluster, node))

        await eventually(seen, 10.0, lambda: f"{node} never had the request")
        rows = (await cluster.ask(node, "requests"))["requests"]
        await cluster.ask(node, "cancel", rows[0]["request"])
        status, body = await answer
        if node == "decode0":
            assert status == 503
            assert body["error"]["code"] == "cancelled"
        else:  # the decoder has it prefilled elsewhere or does it itself
            assert status == 200
            assert body["usage"]["completion_tokens"] == 4


async def test_a_deadline_ends_a_request_with_408(make_cluster: MakeCluster, slow_toy: Path) -> None:
    limits = {"timeout_s": 0.5}
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL, limits=limits) as cluster:
        status, body = await cluster.post("/v1/completions", {"prompt": prompt(2000), "max_tokens": 50})
        assert status == 408
        assert "0.5 s" in body["error"]["message"]


@pytest.mark.parametrize("victim", ["daemon", "executor"])
async def test_a_killed_prefiller_costs_no_answer(make_cluster: MakeCluster, slow_toy: Path, victim: str) -> None:
    async with make_cluster(colocated(), TOY_MODEL) as cluster:
        expected = await cluster.complete(prompt(600), max_tokens=4, ignore_eos=True)
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answer = asyncio.create_task(cluster.complete(prompt(600), max_tokens=4, ignore_eos=True))
        await wait_for_state(cluster, "prefilling")
        daemon = cluster.daemons["prefill0"]
        if victim == "daemon":
            daemon.kill()
        else:
            os.kill(children_of(daemon.pid)[0], signal.SIGKILL)
        assert (await answer)["choices"][0]["text"] == expected["choices"][0]["text"]
        if victim == "daemon":
            await daemon.wait()
        assert (await counters(cluster))["prefill_decisions[decoder,recompute]"] == 1
        if victim == "daemon":
            status = await cluster.ask("decode0", "status")
            assert status["ready"]
            assert "no prefiller is reachable" in status["reason"]
        # It comes back, a daemon at the same address, an executor by itself, and is used again.
        if victim == "daemon":
            await cluster.start("prefill0")

        async def back() -> bool:
            return "apart" in (await cluster.ask("decode0", "status"))["reason"]

        await eventually(back, 30.0, lambda: cluster.log("prefill0"))
        arrived = (await counters(cluster)).get("handoffs[arrived]", 0)
        await cluster.complete(prompt(300, seed=5), max_tokens=1, ignore_eos=True)
        assert (await counters(cluster))["handoffs[arrived]"] == arrived + 1


async def test_a_rank_that_dies_takes_its_replica_down_and_the_others_serve_on(
    make_cluster: MakeCluster, slow_toy: Path
) -> None:
    nodes = prefill_and_decode()
    nodes["decode0"]["replicas"][0]["parallel"] = {"tp": 2}
    nodes["decode0"]["replicas"] *= 2
    async with make_cluster(nodes, slow_toy, handoff=HANDOFF_ALL) as cluster:
        pid = cluster.daemons["decode0"].pid
        before = set(children_of(pid))
        answers = [
            asyncio.create_task(
                cluster.post("/v1/completions", {"prompt": prompt(200, seed), "max_tokens": 80, "ignore_eos": True})
            )
            for seed in range(4)
        ]

        async def all_decoding() -> bool:
            rows = (await cluster.ask("decode0", "requests"))["requests"]
            return [row["state"] for row in rows if row["side"] == "decode"].count("decoding") == len(answers)

        await eventually(all_decoding, 20.0, lambda: cluster.log("decode0"))
        os.kill(children_of(pid)[1], signal.SIGKILL)

        async def one_failed() -> bool:
            replicas = (await cluster.ask("decode0", "status"))["replicas"]
            return sorted(replica["state"] for replica in replicas) == ["failed", "ready"]

        await eventually(one_failed, 10.0, lambda: cluster.log("decode0"))
        statuses = [status for status, _ in await asyncio.gather(*answers)]
        assert set(statuses) == {200}, "those of the lost replica began anew on the other one"
        assert (await counters(cluster))["requests_moved[replica_failed]"] >= 1
        await probe(cluster)

        async def back() -> bool:
            status = await cluster.ask("decode0", "status")
            return bool(status["ready"]) and len(status["replicas"]) == 2

        await eventually(back, 30.0, lambda: cluster.log("decode0"))
        assert len(set(children_of(pid)) - before) == 2
        await asyncio.gather(*(probe(cluster) for _ in range(4)))


@pytest.mark.parametrize("same_host", ["copy", "fabric"])
async def test_a_prefiller_that_stops_is_fenced_and_cannot_write_later(
    make_cluster: MakeCluster, slow_toy: Path, same_host: str
) -> None:
    """When it goes on, another request has the pages that it was writing to. Were its key still open, its executor,
    which has computed meanwhile, would have it write there at once: as strays, and into that request's answer."""
    async with make_cluster(colocated(), TOY_MODEL) as cluster:
        expected = [await text_of(cluster, prompt(600, 0), 1), await text_of(cluster, prompt(600, 1), 14)]
    sections = {
        "handoff": {**HANDOFF_ALL, "retries": 0, "verify": "none"},
        "cluster": {"heartbeat_s": 0.1, "silence_s": 1.5},
        "fabric": {"same_host": same_host},
    }
    nodes = prefill_and_decode(prefix_cache=False, kv_bytes="700 KiB")  # 43 pages: 38 for the first, and for the second
    async with make_cluster(nodes, slow_toy, **sections) as cluster:
        prefiller = cluster.daemons["prefill0"].pid

        async def placed() -> int:
            [status] = (await cluster.ask("decode0", "status"))["replicas"]
            return int(status["copied_bytes"]) + sum(nic["arrived_pieces"] for nic in status["nics"])

        before = await placed()  # the port has measured itself
        first = asyncio.create_task(text_of(cluster, prompt(600, 0), 1))

        async def some_arrived() -> bool:
            return await placed() > before

        await eventually(some_arrived, 20.0, lambda: cluster.log("decode0") + cluster.log("prefill0"))
        os.kill(prefiller, signal.SIGSTOP)
        assert await first == expected[0]
        assert (await counters(cluster))["handoffs[fenced]"] == 1
        second = asyncio.create_task(text_of(cluster, prompt(600, 1), 14))
        await wait_for_state(cluster, "decoding")
        os.kill(prefiller, signal.SIGCONT)
        assert await second == expected[1]

        async def paired() -> bool:  # so what it had in hand when it went on is over
            return "apart" in (await cluster.ask("decode0", "status"))["reason"]

        await eventually(paired, 20.0, lambda: cluster.log("decode0"))
        assert await text_of(cluster, prompt(600, 2), 1)
        counted = await counters(cluster)
        assert counted["handoffs[arrived]"] == 1
        assert "stray_writes" not in counted


async def test_a_killed_decoder_leaves_nothing_on_the_prefiller(make_cluster: MakeCluster, slow_toy: Path) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answer = asyncio.create_task(cluster.complete(prompt(600), max_tokens=4))
        await wait_for_state(cluster, "prefilling")
        cluster.daemons["decode0"].kill()
        with pytest.raises(aiohttp.ClientError):
            await answer
        await cluster.daemons["decode0"].wait()
        await cluster.settled()
        await cluster.start("decode0")
        await cluster.wait_ready()
        await probe(cluster)


async def test_sigterm_lets_running_answers_end(make_cluster: MakeCluster, slow_toy: Path) -> None:
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=HANDOFF_ALL) as cluster:
        answer = asyncio.create_task(cluster.complete(prompt(300), max_tokens=8, ignore_eos=True))
        await wait_for_state(cluster, "prefilling")
        stopped = asyncio.create_task(cluster.stop("decode0"))
        assert (await answer)["usage"]["completion_tokens"] == 8
        assert await stopped == 0
        assert await cluster.stop("prefill0") == 0


async def test_without_a_prefiller_the_reason_is_told_and_requests_are_served(make_cluster: MakeCluster) -> None:
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL) as cluster:
        await cluster.stop("prefill0")

        async def noticed() -> bool:
            return "no prefiller is reachable" in (await cluster.ask("decode0", "status"))["reason"]

        await eventually(noticed, 10.0, lambda: cluster.log("decode0"))
        await probe(cluster)
        assert (await counters(cluster))["prefill_decisions[decoder,recompute]"] == 1


async def test_policy_error_refuses_instead_of_recomputing(make_cluster: MakeCluster) -> None:
    handoff = {"local_prefill_tokens": 0, "on_failure": "error"}
    async with make_cluster(prefill_and_decode(), handoff=handoff) as cluster:
        await cluster.stop("prefill0")

        async def noticed() -> bool:
            async with cluster.session.get(f"{cluster.url}/ready") as response:
                return response.status == 503

        await eventually(noticed, 10.0, lambda: cluster.log("decode0"))
        status, body = await cluster.post("/v1/completions", {"prompt": prompt(40), "max_tokens": 1})
        assert status == 503
        assert body["error"]["code"] == "no_path"


async def test_replicas_that_do_not_fit_say_so_and_are_not_paired(make_cluster: MakeCluster, tmp_path: Path) -> None:
    other = tmp_path / "other-toy"
    shutil.copytree(TOY_MODEL, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    nodes = prefill_and_decode()
    async with make_cluster(nodes, handoff=HANDOFF_ALL) as cluster:
        await cluster.stop("prefill0")
        good = cluster.file.read_text()
        cluster.file.write_text(good.replace(str(TOY_MODEL), str(other)))
        await cluster.start("prefill0")

        async def refused() -> bool:
            return any("num_layers" in row["reason"] for row in (await cluster.ask("decode0", "peers"))["peers"])

        await eventually(refused, 20.0, lambda: cluster.log("decode0"))
        await probe(cluster)
        assert (await counters(cluster))["prefill_decisions[decoder,recompute]"] == 1


async def test_a_daemon_without_the_key_is_kept_out(make_cluster: MakeCluster) -> None:
    async with make_cluster(prefill_and_decode()) as cluster:
        await cluster.stop("prefill0")
        key = cluster.directory / "cluster.key"
        good = key.read_text()
        key.write_text("x" * 64)
        await cluster.start("prefill0")

        async def refused() -> bool:
            return any(row["state"] == "refused" for row in (await cluster.ask("decode0", "peers"))["peers"])

        await eventually(refused, 20.0, lambda: cluster.log("decode0"))
        await probe(cluster)
        await cluster.stop("prefill0")
        key.write_text(good)


async def test_more_requests_than_places_wait_or_get_429(make_cluster: MakeCluster) -> None:
    limits = {"max_queue": 8}
    async with make_cluster(prefill_and_decode(max_sequences=4), limits=limits) as cluster:
        asked = [
            cluster.post("/v1/completions", {"prompt": prompt(100, seed), "max_tokens": 4, "ignore_eos": True})
            for seed in range(64)
        ]
        answers = await asyncio.gather(*asked)
        statuses = [status for status, _ in answers]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 12
        assert all(body["error"]["code"] == "queue_full" for status, body in answers if status == 429)
        await probe(cluster)


async def test_a_decode_batch_that_outgrows_its_pages_is_preempted_and_still_right(make_cluster: MakeCluster) -> None:
    prompts = [prompt(100, seed) for seed in range(6)]

    async def ask_all(cluster: Cluster) -> list[str]:
        asked = [cluster.complete(ids, max_tokens=120, ignore_eos=True) for ids in prompts]
        return [answer["choices"][0]["text"] for answer in await asyncio.gather(*asked)]

    async with make_cluster(colocated()) as cluster:
        expected = await ask_all(cluster)
    async with make_cluster(prefill_and_decode(kv_bytes="704 KiB")) as cluster:  # 44 pages, 704 tokens
        for seed in range(80):  # answers that make longer ones unexpected
            await cluster.complete(prompt(8, seed), max_tokens=1)
        assert await ask_all(cluster) == expected
        assert (await counters(cluster))["preemptions"] > 0


@pytest.mark.parametrize(
    "garbage", [b"\x00" * 70_000, b"\xff\xff\xff\xff" * 10, b"GET / HTTP/1.1\r\n\r\n", b"\x80\x04."]
)
async def test_strangers_at_every_port_change_nothing(make_cluster: MakeCluster, garbage: bytes) -> None:
    nodes = prefill_and_decode()
    async with make_cluster(nodes) as cluster:
        for port in (
            nodes["prefill0"]["control_port"],
            nodes["decode0"]["control_port"],
            nodes["decode0"]["http"]["port"],
        ):
            await throw(*await asyncio.open_connection("127.0.0.1", port), garbage)
        await throw(*await asyncio.open_unix_connection(cluster.run_dir / "decode0.sock"), garbage)
        await probe(cluster)
        assert all(daemon.returncode is None for daemon in cluster.daemons.values())


async def throw(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, garbage: bytes) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(10):
            while await reader.read(65536):
                pass
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def test_a_node_that_only_serves_http_hands_requests_to_a_decoder_elsewhere(make_cluster: MakeCluster) -> None:
    nodes: dict[str, Any] = prefill_and_decode()
    (control,) = free_ports(1)
    nodes["front0"] = {"control_port": control, "http": nodes["decode0"].pop("http")}
    async with make_cluster(nodes) as cluster:
        await probe(cluster)
        status, body = await cluster.post("/v1/completions", {"prompt": prompt(9000), "max_tokens": 1})
        assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
        await cluster.stop("decode0")
        status, _ = await cluster.post("/v1/completions", {"prompt": prompt(40), "max_tokens": 1})
        assert status == 503
