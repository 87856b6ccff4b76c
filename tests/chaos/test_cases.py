"""How disaggregated servers fail in public, each kind as a test with real processes; the table is docs/reliability.md.

After every test `make_cluster` checks that all pages are back, nothing runs, and no invariant is broken. Texts are
those of the toy: one wrong byte of KV changes them. Handoffs are verified (`handoff.verify: pages`), but for case 6:
there nothing but the text would tell a late write.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml
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
    text_of,
    wait_for_state,
)
from expected import Toy
from ghost import Ghost, ghost_of
from namespaces import Namespaces, nodes_in

from pdd.base.ids import Immediate, Incarnation, NodeName, PageId, ReplicaName, RequestId
from pdd.fabric.immediate import pack as pack_immediate
from pdd.wire import messages as wire


@pytest.fixture
def toy(tmp_path: Path) -> Toy:
    return Toy(tmp_path / "cache")


async def vanish(*clients: asyncio.Task[Any]) -> None:
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def paired(cluster: Cluster) -> None:
    """Until the decoder hands off again: it is ready without any prefiller, too, once it has seen one."""

    async def apart() -> bool:
        return "apart" in (await cluster.ask("decode0", "status"))["reason"]

    await eventually(apart, 20.0, lambda: cluster.log("decode0"))


async def owned(cluster: Cluster, node: str) -> int:
    total: int = sum(pool["owned"] + pool["quarantined"] for pool in (await cluster.ask(node, "kv"))["replicas"])
    return total


# Pages that somebody changes on their way.


def arena_of(pid: int) -> Path:
    return next(it for it in Path(f"/proc/{pid}/fd").iterdir() if "pdd-arena" in os.readlink(it))


async def flip_first_byte(arena: Path) -> None:
    """Of the decoder's first page, as soon as something has been written there."""
    with arena.open("r+b", buffering=0) as memory:

        async def arrived() -> bool:
            memory.seek(0)
            return memory.read(1) != b"\0"

        await eventually(arrived, 20.0, lambda: "the first page never arrived")
        memory.seek(0)
        byte = memory.read(1)[0]
        memory.seek(0)
        memory.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("verify", ["pages", "none"])
async def test_a_corrupted_page_is_caught_before_the_first_token(
    make_cluster: MakeCluster, slow_toy: Path, toy: Toy, verify: str
) -> None:
    """With no other attempt allowed the decoder computes what came corrupt; unverified, that byte is in the text."""
    handoff = {**HANDOFF_ALL, "verify": verify, "retries": 0}
    async with make_cluster(prefill_and_decode(), slow_toy, handoff=handoff) as cluster:
        body = {"prompt": prompt(600), "max_tokens": 4, "ignore_eos": True}
        answer = asyncio.create_task(read_stream(cluster, body))
        await flip_first_byte(arena_of(cluster.daemons["decode0"].pid))
        text = "".join(choice["text"] for chunk in await answer for choice in chunk["choices"])
        assert (text == toy.text(prompt(600), 4)) == (verify == "pages")
        counted = await counters(cluster)
        assert counted.get("handoffs[corrupt]", 0) == counted.get("prefill_decisions[decoder,recompute]", 0)
        assert counted.get("handoffs[corrupt]", 0) == (verify == "pages")
        rows = (await cluster.ask("decode0", "requests"))["requests"]
        [story] = (await cluster.ask("decode0", "story", rows[0]["request"]))["stories"]
        caught = [line["at_s"] for line in story["lines"] if "differ from those that prefill0/0 sent" in line["reason"]]
        assert bool(caught) == (verify == "pages")
        assert all(at_s < story["ttft_s"] for at_s in caught)


# 1, 28: tickets and ids that are nobody's.


@asynccontextmanager
async def haunted(make_cluster: MakeCluster) -> AsyncIterator[tuple[Cluster, Ghost]]:
    """A cluster whose third node, a decoder, is played by the test."""
    nodes = prefill_and_decode()
    (control,) = free_ports(1)
    nodes["ghost0"] = {"control_port": control, "replicas": [dict(nodes["decode0"]["replicas"][0])]}
    async with (
        make_cluster(nodes, absent=("ghost0",), handoff=HANDOFF_ALL) as cluster,
        ghost_of(cluster) as ghost,
    ):
        ghost.announce()
        ghost.grant()
        yield cluster, ghost


BAD_TICKETS: dict[str, dict[str, Any]] = {
    "target_pages: some are outside": {"target_pages": (PageId(0), PageId(1), PageId(10**6))},
    "target_pages: a page stands there twice": {"target_pages": (PageId(0), PageId(1), PageId(1))},
    "target_pages: 1 for 3": {"target_pages": (PageId(0),)},
    "the ticket is of incarnation": {"target_incarnation": Incarnation("0" * 16)},
    "shape_digest": {"shape_digest": "0" * 16},
    "start_token": {"start_token": 8},
    "is no replica of ghost0": {"target_replica": ReplicaName("decode0/0")},
    "is not up on node prefill0": {"source_replica": ReplicaName("prefill0/7")},
    "immediates": {"immediates": (Immediate(5),)},
    "lease_s": {"lease_s": float("nan")},
}


async def test_case_01_stale_or_foreign_kv_is_accepted(make_cluster: MakeCluster) -> None:
    """A ticket with wrong pages, of another life, or used before is refused, and nothing is held for it."""
    async with haunted(make_cluster) as (cluster, ghost):
        prefiller = NodeName("prefill0")
        for words, changes in BAD_TICKETS.items():
            ghost.links.send(prefiller, ghost.ticket(**changes))
            assert words in (await ghost.answer(wire.PrefillRejected)).reason
            assert await owned(cluster, "prefill0") == 0
        ghost.links.send(prefiller, ghost.ticket(immediates=(pack_immediate(3, 0),)))
        await ghost.answer(wire.PrefillEnded)
        ghost.links.send(prefiller, ghost.ticket(immediates=(pack_immediate(3, 0),), request=RequestId("again")))
        assert "used by an earlier ticket" in (await ghost.answer(wire.PrefillRejected)).reason
        assert ghost.down == []
        await probe(cluster)


async def test_case_28_a_stranger_names_ids_that_are_not_its_own(make_cluster: MakeCluster, toy: Toy) -> None:
    """News and cancels of requests that a peer does not have change nothing, are counted, and leave nothing behind."""
    async with haunted(make_cluster) as (cluster, ghost):
        answer = asyncio.create_task(text_of(cluster, prompt(600), 40))

        async def seen() -> bool:
            return bool(await owned(cluster, "decode0"))

        await eventually(seen, 10.0, lambda: "the request never had pages")
        rows = (await cluster.ask("decode0", "requests"))["requests"]
        victim = RequestId(next(row["request"] for row in rows if row["side"] == "decode"))
        for request in (victim, RequestId("orphan"), RequestId("")):
            for slot in range(4):
                lie = {"request": request, "immediate": pack_immediate(slot, 0)}
                for message in (
                    wire.PrefillAccepted(**lie),
                    wire.PrefillRejected(**lie, code="rejected", reason="no"),
                    wire.PrefillEnded(**lie, num_cached_tokens=0, compute_s=0.0),
                    wire.PrefillStopped(**lie, num_pieces=(0,), reason="no"),
                    wire.CancelPrefill(**lie),
                    wire.Cancel(request=request, stopped=False),
                ):
                    ghost.links.send(NodeName("decode0"), message)
        assert await answer == toy.text(prompt(600), 40)
        found = await counters(cluster)
        assert found["stale_messages[PrefillStopped]"] >= 8
        assert ghost.down == []


async def test_case_28_a_client_chooses_peers_or_ids(make_cluster: MakeCluster) -> None:
    """Fields that name hosts, peers or ids are a 400 that says so."""
    async with make_cluster(prefill_and_decode()) as cluster:
        for field, value in {"request_id": "mine", "kv_transfer_params": {"remote_host": "10.0.0.1"}}.items():
            status, body = await cluster.post("/v1/completions", {"prompt": "hi", field: value})
            assert (status, body["error"]["param"]) == (400, field)
        assert (await cluster.ask("decode0", "requests"))["requests"] == []


# 2, 3, 6, 7: what happens to a handoff on its way.


BOTH_WAYS = pytest.mark.parametrize("same_host", ["fabric", "copy"])


@BOTH_WAYS
async def test_case_02_the_lease_runs_out_before_the_transfer(
    make_cluster: MakeCluster, slow_toy: Path, toy: Toy, same_host: str
) -> None:
    """A decoder that slept through the lease does not believe what came of it, and answers rightly all the same."""
    sections = {"handoff": {**HANDOFF_ALL, "lease_s": 0.4}, "cluster": {"silence_s": 60}}
    sections["fabric"] = {"same_host": same_host}
    async with make_cluster(prefill_and_decode(), slow_toy, **sections) as cluster:
        answer = asyncio.create_task(text_of(cluster, prompt(800), 4))
        await wait_for_state(cluster, "prefilling")
        decoder = cluster.daemons["decode0"]
        decoder.send_signal(signal.SIGSTOP)

        async def given_up() -> bool:
            rows = (await cluster.ask("prefill0", "requests"))["requests"]
            return bool(rows) and all(row["state"] == "cancelled" for row in rows)

        try:
            await eventually(given_up, 20.0, lambda: cluster.log("prefill0"))
        finally:
            decoder.send_signal(signal.SIGCONT)
        assert await answer == toy.text(prompt(800), 4)
        found = await counters(cluster)
        assert "handoffs[arrived]" not in found
        assert found["handoffs[failed]"] >= 1


NUM_KILLS = int(os.environ.get("PDD_CHAOS_KILLS", "16"))
NUM_PREFILLERS = 4
"""That die at once: to start them again is what takes the time."""


@pytest.mark.slow
@pytest.mark.timeout(90 + 3 * NUM_KILLS)
@BOTH_WAYS
async def test_case_03_the_prefiller_dies_mid_push_while_the_client_cancels(
    make_cluster: MakeCluster, slow_toy: Path, same_host: str
) -> None:
    """`PDD_CHAOS_KILLS` times, half of them each way, four at once, the clients leaving before, with, or after them:
    the decoder's pages are back, every time, by the deadline."""
    rng = random.Random(NUM_KILLS)
    nodes = prefill_and_decode(kv_bytes="32 MiB", max_sequences=32)
    prefillers = [f"prefill{index}" for index in range(NUM_PREFILLERS)]
    for name, control in zip(prefillers[1:], free_ports(NUM_PREFILLERS - 1), strict=True):
        nodes[name] = {**nodes["prefill0"], "control_port": control}
    back_s: list[float] = []
    sections = {"handoff": {**HANDOFF_ALL, "retries": 0}, "cluster": {"heartbeat_s": 0.1}}
    async with make_cluster(nodes, slow_toy, fabric={"same_host": same_host}, **sections) as cluster:
        loop = asyncio.get_running_loop()
        clients: list[asyncio.Task[str]] = []

        async def pushing() -> bool:
            """Where they are few, their beginnings choose the prefiller: more come until each has something to do."""
            rows = [(await cluster.ask(name, "requests"))["requests"] for name in prefillers]
            if all(any(row["state"] == "prefilling" for row in of_one) for of_one in rows):
                return True
            if len(clients) < 32:
                ids = [rng.randrange(250) for _ in range(900)]
                clients.append(asyncio.create_task(text_of(cluster, ids, 4)))
            return False

        async def all_known() -> bool:
            rows = (await cluster.ask("decode0", "peers"))["peers"]
            return all(row["replicas"] for row in rows)

        async def kill() -> None:
            await asyncio.sleep(rng.uniform(0, 0.2))  # at any moment of the push
            for name in prefillers:
                cluster.daemons[name].kill()

        async def leave() -> None:
            await asyncio.sleep(rng.uniform(0, 0.2))
            await vanish(*clients)

        await eventually(all_known, 20.0, lambda: cluster.log("decode0"))
        for turn in range(-(-NUM_KILLS // 2 // NUM_PREFILLERS)):
            clients.clear()
            await eventually(pushing, 20.0, lambda: "some prefiller never had anything to do")
            if turn % 3 == 0:
                await asyncio.gather(kill(), leave())
            elif turn % 3 == 1:
                await kill()
                await vanish(*clients)
            else:
                await vanish(*clients[::2])
                await kill()
                await vanish(*clients)
            killed_s = loop.time()
            await asyncio.gather(*(cluster.daemons[name].wait() for name in prefillers))
            await cluster.settled()
            back_s.append(loop.time() - killed_s)
            await cluster.start(*prefillers)
            await cluster.wait_ready()
            await eventually(all_known, 20.0, lambda: cluster.log("decode0"))
        counted = await counters(cluster)
        await probe(cluster)
    print(f"\n{NUM_PREFILLERS * len(back_s)} kills; pages back after {statistics.median(back_s):.3f} s (p50), "
          f"{max(back_s):.3f} s (max); handoffs: {counted.get('handoffs[fenced]', 0)} fenced, "
          f"{counted.get('handoffs[drained]', 0)} drained")  # fmt: skip
    assert counted["handoffs[fenced]"] >= len(back_s)


@BOTH_WAYS
async def test_case_06_one_of_several_transfers_fails(
    make_cluster: MakeCluster, slow_toy: Path, toy: Toy, same_host: str
) -> None:
    """One rank of the prefiller dies mid-transfer; a request that starts at once gets no page that is written late."""
    nodes = prefill_and_decode(kv_bytes="1 MiB")  # so few pages that the second request waits for those of the first
    nodes["prefill0"]["replicas"][0] |= {"parallel": {"tp": 2}, "kv_bytes": "1 MiB"}
    sections = {"handoff": {**HANDOFF_ALL, "verify": "none"}, "fabric": {"same_host": same_host}}
    async with make_cluster(nodes, slow_toy, **sections) as cluster:
        first = asyncio.create_task(text_of(cluster, prompt(700), 4))
        await wait_for_state(cluster, "prefilling")
        os.kill(children_of(cluster.daemons["prefill0"].pid)[1], signal.SIGKILL)
        second = asyncio.create_task(text_of(cluster, prompt(700, 1), 4))
        assert await first == toy.text(prompt(700), 4)
        assert await second == toy.text(prompt(700, 1), 4)


async def test_case_07_a_cancel_storm_wedges_the_prefiller(make_cluster: MakeCluster) -> None:
    """Many long prompts at once, all of whose clients vanish mid-way, twice: `/ready` says so all the time, and a probe
    is served right after."""
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL) as cluster:

        async def ready() -> bool:
            async with cluster.session.get(f"{cluster.url}/ready") as response:
                return response.status == 200

        for turn in range(2):
            clients = [
                asyncio.create_task(cluster.post("/v1/completions", {"prompt": prompt(1500, seed), "max_tokens": 9}))
                for seed in range(60 * turn, 60 * turn + 60)
            ]

            async def busy() -> bool:
                return bool(await owned(cluster, "prefill0"))

            await eventually(busy, 20.0, lambda: "nothing was ever prefilled")
            assert await ready()
            await vanish(*clients)
            assert await ready()
            await probe(cluster)
        await cluster.settled()


# 9, 11, 12, 13, 15: the edges of a request.


async def test_case_09_bad_lengths(make_cluster: MakeCluster, toy: Toy) -> None:
    """The longest prompt works; one token more, more than all KV, or nothing is a 400 before any page is taken."""
    async with make_cluster(prefill_and_decode(kv_bytes="256 KiB")) as cluster:  # 256 tokens
        looked_up = [pool["queried_tokens"] for pool in (await cluster.ask("decode0", "kv"))["replicas"]]
        for ids in (prompt(256), prompt(257), prompt(4097), [], ""):
            status, body = await cluster.post("/v1/completions", {"prompt": ids, "max_tokens": 1})
            assert (status, body["error"]["param"]) == (400, "prompt")
        assert looked_up == [pool["queried_tokens"] for pool in (await cluster.ask("decode0", "kv"))["replicas"]]
        assert (await counters(cluster, "prefill0")).get("requests_ended[prefill,sent]", 0) == 0
        assert await text_of(cluster, prompt(255), 1) == toy.text(prompt(255), 1)


def first_token_is(toy: Toy, wanted: Callable[[int], bool]) -> list[int]:
    """A prompt of a handoff's length that the toy continues with such a token."""
    return next(
        ids for ids in ([seed % 250, seed // 250, *prompt(58)] for seed in range(5000)) if wanted(toy.tokens(ids, 1)[0])
    )


async def read_stream(cluster: Cluster, body: dict[str, Any]) -> list[dict[str, Any]]:
    """All chunks."""
    body = {"model": "toy", "temperature": 0, "stream": True, **body}
    async with cluster.session.post(f"{cluster.url}/v1/completions", json=body) as response:
        lines = (await response.text()).splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(chunk) for chunk in data[:-1]]


async def test_cases_11_to_15_edges_of_an_answer_are_those_of_a_colocated_one(
    make_cluster: MakeCluster, toy: Toy
) -> None:
    """max_tokens 1 and 2; a first token that is EOS or a stop string, min_tokens, logprobs: streamed or not, apart as
    colocated."""
    ends = first_token_is(toy, lambda token: token == toy.config.vocab_size - 4)
    letter = first_token_is(toy, lambda token: 97 <= token < 123)
    stop = chr(toy.tokens(letter, 1)[0])
    bodies: list[dict[str, Any]] = [
        {"prompt": prompt(60), "max_tokens": 1, "ignore_eos": True},
        {"prompt": prompt(60), "max_tokens": 2, "ignore_eos": True},
        {"prompt": ends, "max_tokens": 5},
        {"prompt": ends, "max_tokens": 5, "ignore_eos": True},
        {"prompt": ends, "max_tokens": 5, "min_tokens": 2},
        {"prompt": letter, "max_tokens": 5, "stop": stop},
        {"prompt": letter, "max_tokens": 5, "stop": stop, "include_stop_str_in_output": True},
        {"prompt": letter, "max_tokens": 5, "ignore_eos": True, "stop": stop, "min_tokens": 2},
        {"prompt": prompt(60), "max_tokens": 4, "ignore_eos": True, "logprobs": 5},
    ]

    async def answers(cluster: Cluster) -> list[Any]:
        found: list[Any] = []
        for body in bodies:
            whole = await cluster.complete(**body)
            chunks = await read_stream(cluster, {**body, "stream_options": {"include_usage": True}})
            (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
            choices = [choice for chunk in chunks for choice in chunk["choices"]]
            (choice,) = whole["choices"]
            assert "".join(part["text"] for part in choices) == choice["text"]
            assert [part["finish_reason"] for part in choices if part["finish_reason"]] == [choice["finish_reason"]]
            assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]
            found.append((choice["text"], choice["finish_reason"], choice["logprobs"], usage["completion_tokens"]))
        for fields in ({"prompt_logprobs": 1}, {"echo": True, "logprobs": 1}):
            status, _ = await cluster.post("/v1/completions", {"prompt": "hi", "max_tokens": 1, **fields})
            assert status == 400
        return found

    async with make_cluster(colocated()) as cluster:
        expected = await answers(cluster)
    async with make_cluster(prefill_and_decode(), handoff=HANDOFF_ALL) as cluster:
        assert await answers(cluster) == expected
        assert (await counters(cluster))["handoffs[arrived]"] >= 3  # the others found their prompt in the cache
    (one, two, at_end, *_, last) = expected
    assert (one[1], one[3], two[1], two[3]) == ("length", 1, "length", 2)
    assert at_end[:2] == ("", "stop")
    assert last[2] is not None


# 20, 22: processes and links that come back.


async def incarnation_of(cluster: Cluster, node: str, seen_by: str) -> str | None:
    rows = (await cluster.ask(seen_by, "peers"))["peers"]
    return next((row["incarnation"] for row in rows if row["node"] == node and row["state"] == "up"), None)


@pytest.mark.parametrize("victim", ["prefill0", "decode0"])
async def test_case_20_a_restart_at_the_same_address_under_load(
    make_cluster: MakeCluster, toy: Toy, victim: str
) -> None:
    """Its new incarnation is noticed; meanwhile answers are right or a 503, and then handoffs arrive again."""
    nodes = prefill_and_decode()
    (control,) = free_ports(1)
    nodes["front0"] = {"control_port": control, "http": nodes["decode0"].pop("http")}
    async with make_cluster(nodes, handoff=HANDOFF_ALL) as cluster:
        statuses: set[int] = set()
        over = asyncio.Event()

        async def client(seed: int) -> None:
            while not over.is_set():
                seed += 100
                body = {"prompt": prompt(100, seed), "max_tokens": 4, "ignore_eos": True}
                status, answer = await cluster.post("/v1/completions", body)
                statuses.add(status)
                if status == 200:
                    assert answer["choices"][0]["text"] == toy.text(prompt(100, seed), 4)
                else:
                    await asyncio.sleep(0.1)

        observer = "decode0" if victim == "prefill0" else "prefill0"
        before = await incarnation_of(cluster, victim, observer)
        clients = [asyncio.create_task(client(seed)) for seed in range(4)]
        await eventually(lambda: _true(200 in statuses), 10.0, lambda: "nothing was answered")
        await cluster.stop(victim, signal.SIGKILL)
        await cluster.start(victim)

        async def noticed() -> bool:
            return await incarnation_of(cluster, victim, observer) not in (None, before)

        await eventually(noticed, 20.0, lambda: cluster.log(observer))
        arrived = (await counters(cluster)).get("handoffs[arrived]", 0)

        async def handed_off() -> bool:
            return (await counters(cluster)).get("handoffs[arrived]", 0) > arrived

        await eventually(handed_off, 20.0, lambda: cluster.log(observer))
        over.set()
        await asyncio.gather(*clients)
        assert statuses <= {200, 503}
        await cluster.wait_ready()


async def _true(value: bool) -> bool:
    return value


CUTS = {
    "barely noticed": ({"heartbeat_s": 0.1, "silence_s": 0.8}, 0.0),
    "30 s": ({}, 30.0),  # with the topology's defaults
}
"""Section `cluster`; how long the cut lasts, if it is noticed by then."""


@pytest.mark.slow
@pytest.mark.parametrize("cut", CUTS)
async def test_case_22_the_link_is_cut(
    make_cluster: MakeCluster, slow_toy: Path, toy: Toy, pair: Namespaces, cut: str
) -> None:
    """Nothing gets through until both sides have noticed, or for 30 s: every request ends, and rightly, those that come
    meanwhile as well; then the pair heals by itself."""
    section, cut_s = CUTS[cut]
    nodes, within = nodes_in(pair)
    async with make_cluster(nodes, slow_toy, within=within, handoff=HANDOFF_ALL, cluster=section) as cluster:
        loop = asyncio.get_running_loop()
        asked = [asyncio.create_task(text_of(cluster, prompt(500, seed), 4)) for seed in range(4)]
        await wait_for_state(cluster, "prefilling")
        pair.cut()
        mended_s = loop.time() + cut_s
        assert await asyncio.gather(*asked) == [toy.text(prompt(500, seed), 4) for seed in range(4)]

        async def both(up: bool) -> bool:
            seen = [await incarnation_of(cluster, *two) for two in (("prefill0", "decode0"), ("decode0", "prefill0"))]
            return all((incarnation is not None) == up for incarnation in seen)

        await eventually(lambda: both(False), 20.0, lambda: cluster.log("decode0"))
        await cluster.settled()
        seed = 4
        while loop.time() < mended_s or seed == 4:
            assert await text_of(cluster, prompt(100, seed), 4) == toy.text(prompt(100, seed), 4)
            seed += 1
            await asyncio.sleep(min(1.0, cut_s))
        pair.mend()
        await eventually(lambda: both(True), 20.0, lambda: cluster.log("decode0"))
        await paired(cluster)
        arrived = (await counters(cluster)).get("handoffs[arrived]", 0)
        assert await text_of(cluster, prompt(300, seed), 4) == toy.text(prompt(300, seed), 4)
        assert (await counters(cluster))["handoffs[arrived]"] == arrived + 1


# 26, 27, 29, 30: what is wrong from the start.


async def test_case_26_a_config_is_silently_accepted(tmp_path: Path) -> None:
    """Every fault of the file is told at once, with its line, and the daemon ends with 4."""
    cluster = Cluster(tmp_path, prefill_and_decode(page_tokenz=16), TOY_MODEL, tmp_path / "cache")
    cluster.file.write_text(cluster.file.read_text().replace("8 MiB", "8 MB"))
    try:
        await cluster.start("decode0")
        assert await cluster.daemons["decode0"].wait() == 4
        log = cluster.log("decode0")
        assert log.count("did you mean page_tokens") == 2
        assert log.count("kv_bytes") == 2
        assert f"{cluster.file}:" in log
    finally:
        await cluster.close()


async def test_case_27_disaggregated_but_silently_not(tmp_path: Path) -> None:
    """A deployment whose prefiller is unreachable from the start says so on /ready and in a counter; it serves."""
    cluster = Cluster(tmp_path, prefill_and_decode(), TOY_MODEL, tmp_path / "cache", handoff=HANDOFF_ALL)

    async def told() -> bool:
        with contextlib.suppress(aiohttp.ClientConnectionError):
            async with cluster.session.get(f"{cluster.url}/ready") as response:
                return response.status == 503 and "no prefiller is reachable" in await response.text()
        return False

    try:
        await cluster.start("decode0")
        await eventually(told, 20.0, lambda: cluster.log("decode0"))
        await probe(cluster)
        assert (await counters(cluster))["prefill_decisions[decoder,recompute]"] == 1
        await cluster.settled()
        await cluster.end_cleanly()
    finally:
        await cluster.close()


async def test_case_29_hostile_bytes_from_one_who_has_the_key(make_cluster: MakeCluster) -> None:
    """A peer's nonsense closes its link and nothing else; after it comes back it is heard again."""
    async with haunted(make_cluster) as (cluster, ghost):
        for junk in (b"\xff\xff\xff\xff", b"\x80\x04\x95" + bytes(64), b"\x00\x00\x00\x02{}", bytes(70_000)):
            num_down = len(ghost.down)
            link = ghost.links._peers[NodeName("prefill0")].link
            assert link is not None
            assert link._transport is not None
            link._transport.write(junk)
            await eventually(lambda n=num_down: _true(len(ghost.down) > n), 10.0, lambda: "the link stays up")
            await eventually(lambda: _true("prefill0" in ghost.up), 10.0, lambda: "the link does not come back")
            await probe(cluster)


@pytest.mark.parametrize(
    ("section", "field", "value"), [("model", "dtype", "bfloat16"), ("fabric", "provider", "shm")], ids=["dtype", "shm"]
)
async def test_case_30_incompatible_replicas(
    make_cluster: MakeCluster, toy: Toy, section: str, field: str, value: str
) -> None:
    """A prefiller of another kind is refused with the field; the one that fits serves on."""
    nodes = prefill_and_decode()
    (control,) = free_ports(1)
    nodes["prefill1"] = {**nodes["prefill0"], "control_port": control}
    async with make_cluster(nodes, absent=("prefill1",), handoff=HANDOFF_ALL) as cluster:
        document = yaml.safe_load(cluster.file.read_text())
        document.setdefault(section, {})[field] = value
        cluster.file.write_text(yaml.safe_dump(document))
        await cluster.start("prefill1")

        async def refused() -> bool:
            rows = {row["node"]: row for row in (await cluster.ask("decode0", "peers"))["peers"]}
            return field in rows["prefill1"]["reason"]

        await eventually(refused, 20.0, lambda: cluster.log("prefill1"))
        assert await text_of(cluster, prompt(100), 4) == toy.text(prompt(100), 4)
        assert (await counters(cluster))["handoffs[arrived]"] == 1
