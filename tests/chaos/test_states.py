"""A fault of the other machine in every state that can be seen of a request on both sides.

A scene brings requests into pairs of states (decode side/prefill side); then the prefiller or the decoder is killed,
or stopped until it is held for lost, or the cable between them is cut. What is left must end every request, rightly
where a decoder is left, and free its pages without the other's help; afterwards the pair must heal by itself.

Allocated on the decode side and the ends of both sides are passed within one turn of an event loop: nobody can see a
request there. All scenes take minutes: by default those of SCENES are run that a seed draws, which is printed on
failure; `PDD_CHAOS_STATES=all` runs them all, a number draws those of that seed.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from cluster import ENDED, HANDOFF_ALL, Cluster, MakeCluster, eventually, free_ports, prompt
from cluster import prefill_and_decode as nodes_here
from expected import Toy
from namespaces import Namespaces, nodes_in
from wide_toy import wide_toy

__all__ = ["wide_toy"]

PROMPT_TOKENS = 1025
"""One chunk, 16 MiB of KV: more than sockets hold, so that writes to a stopped process stay on their way."""
LONG_ANSWER = 24
LEASE_S = 10.0
SECTIONS = {"handoff": {**HANDOFF_ALL, "lease_s": LEASE_S}, "cluster": {"heartbeat_s": 0.2, "silence_s": 1.5}}
FAULTS = ("SIGKILL", "SIGSTOP", "cut")
LOST = {"no_path", "replica_failed", "going_down"}


class Missed(Exception):
    """A scene did not come about: on a busy machine a state may pass unseen, or take longer than the silence."""


class Stage:
    """A prefiller, a decoder, a node that serves HTTP, and the requests of a scene."""

    def __init__(self, cluster: Cluster, toy: Toy) -> None:
        self.cluster = cluster
        self._toy = toy
        self._num_asked = 0
        self._clients: list[tuple[asyncio.Task[tuple[int, dict[str, Any]]], list[int], int]] = []
        self.stopped: set[str] = set()

    def ask(self, max_tokens: int = 2, num_tokens: int = PROMPT_TOKENS) -> None:
        ids = prompt(num_tokens, self._num_asked)
        self._num_asked += 1
        body = {"prompt": ids, "max_tokens": max_tokens, "ignore_eos": True}
        task = asyncio.create_task(self.cluster.post("/v1/completions", body))
        self._clients.append((task, ids, max_tokens))

    async def leave(self) -> None:
        """All clients do."""
        for task, *_ in self._clients:
            task.cancel()
        await asyncio.gather(*(task for task, *_ in self._clients), return_exceptions=True)
        self._clients.clear()

    async def states(self, node: str) -> set[str]:
        rows = (await self.cluster.ask(node, "requests"))["requests"]
        return {row["state"] for row in rows if row["state"] not in ENDED}

    async def until(self, **wanted: set[str]) -> None:
        """Until each node has requests in all of the states that are wanted there."""

        async def reached() -> bool:
            return all([states <= await self.states(node) for node, states in wanted.items()])

        try:
            await eventually(reached, 8.0, lambda: f"{wanted} was never seen")
        except AssertionError as error:
            raise Missed from error

    async def reach(self, scene: Scene) -> None:
        """Raises Missed when it does not come about in several attempts."""
        for _ in range(2):
            try:
                return await scene.reach(self)
            except Missed:
                for node in list(self.stopped):
                    self.signal(node, signal.SIGCONT)
                await self.judge(may_be_lost=True)
                await self.heals()
        return await scene.reach(self)

    def signal(self, node: str, number: signal.Signals) -> None:
        (self.stopped.add if number is signal.SIGSTOP else self.stopped.discard)(node)
        self.cluster.daemons[node].send_signal(number)

    async def judge(self, may_be_lost: bool) -> None:
        """Every client that is still there got the right text, or was told that its decoder is lost."""
        async with asyncio.timeout(40):
            for task, ids, max_tokens in self._clients:
                status, answer = await task
                if status == 200:
                    assert answer["choices"][0]["text"] == self._toy.text(ids, max_tokens)
                else:
                    assert may_be_lost, answer
                    assert (status, answer["error"]["code"] in LOST) == (503, True), answer
        self._clients.clear()

    async def settled(self, *nodes: str) -> None:
        """These hold nothing, whatever the others do."""

        async def zero() -> bool:
            for node in nodes:
                for pool in (await self.cluster.ask(node, "kv"))["replicas"]:
                    assert pool["problems"] == []
                    if pool["owned"] or pool["quarantined"]:
                        return False
                if await self.states(node):
                    return False
            return True

        await eventually(zero, LEASE_S + 1, lambda: "\n".join(map(self.cluster.log, nodes)))

    async def heals(self) -> None:
        """Until a prompt is handed off and answered."""
        before = -1

        async def handed_off() -> bool:
            nonlocal before
            counted = (await self.cluster.ask("decode0", "status"))["counters"].get("handoffs[arrived]", 0)
            if 0 <= before < counted:
                return True
            before = counted
            self.ask(num_tokens=100)
            await self.judge(may_be_lost=True)
            return False

        await eventually(handed_off, 30.0, lambda: self.cluster.log("decode0"))


# How requests come into their states.


async def crowd(stage: Stage) -> None:
    """More than either side takes at a time."""
    for _ in range(4):
        stage.ask()
    await stage.until(decode0={"queued", "prefilling"}, prefill0={"received", "allocated", "prefilling"})


async def writes_stay_on_their_way(stage: Stage) -> None:
    """The decoder sleeps."""
    stage.ask()
    await stage.until(decode0={"prefilling"}, prefill0={"prefilling"})
    stage.signal("decode0", signal.SIGSTOP)
    await stage.until(prefill0={"transferring"})


async def pages_are_compared(stage: Stage) -> None:
    """A moment between prefill and answer: the next request is asked for where it was missed."""

    async def both() -> bool:
        if not await stage.states("decode0"):
            stage.ask()
        return "transferring" in await stage.states("decode0") and "transferring" in await stage.states("prefill0")

    try:
        await eventually(both, 30.0, lambda: "no request was ever seen transferring on both sides")
    except AssertionError as error:
        raise Missed from error


async def client_leaves_while_prefiller_sleeps(stage: Stage) -> None:
    stage.ask()
    await stage.until(decode0={"prefilling"}, prefill0={"prefilling"})
    stage.signal("prefill0", signal.SIGSTOP)
    await stage.leave()
    await stage.until(decode0={"draining"})


async def operator_cancels_while_decoder_sleeps(stage: Stage) -> None:
    await writes_stay_on_their_way(stage)
    rows = (await stage.cluster.ask("prefill0", "requests"))["requests"]
    [request] = [row["request"] for row in rows if row["state"] not in ENDED]
    await stage.cluster.ask("prefill0", "cancel", request)
    await stage.until(prefill0={"draining"})


async def another_is_decoded(stage: Stage) -> None:
    """What has arrived waits for the end of its step."""
    stage.ask(max_tokens=LONG_ANSWER)
    await stage.until(decode0={"decoding"})
    stage.ask()
    await stage.until(decode0={"decoding", "ready"})


class Scene(NamedTuple):
    pairs: str
    reach: Callable[[Stage], Awaitable[None]]
    victims: tuple[str, ...] = ("prefill0", "decode0")


SCENES = (
    Scene("queued/-, prefilling/received, prefilling/allocated, prefilling/prefilling", crowd),
    Scene("prefilling/transferring", writes_stay_on_their_way),
    Scene("transferring/transferring", pages_are_compared),
    Scene("draining/prefilling", client_leaves_while_prefiller_sleeps),
    Scene("prefilling/draining", operator_cancels_while_decoder_sleeps),
    Scene("ready/sent, decoding/sent", another_is_decoded, ("prefill0",)),
)


# The faults.


async def strike(stage: Stage, fault: str, victim: str, pair: Namespaces | None) -> None:
    """Until what is left has noticed, ended its requests, and given their pages back."""
    other = "decode0" if victim == "prefill0" else "prefill0"
    if fault == "SIGKILL":
        stage.cluster.daemons[victim].kill()
        await stage.cluster.daemons[victim].wait()
        stage.stopped.discard(victim)
    elif fault == "SIGSTOP":
        stage.signal(victim, signal.SIGSTOP)
    elif pair is not None:
        pair.cut()
    for node in list(stage.stopped - ({victim} if fault == "SIGSTOP" else set())):
        stage.signal(node, signal.SIGCONT)
    began_s = time.monotonic()
    left = ("prefill0", "decode0") if fault == "cut" else (other,)
    await eventually(lambda: _apart(stage, left), 20.0, lambda: f"{left} did not notice")
    await stage.settled(*left)
    print(f"{fault} {victim}: {other} had its pages back after {time.monotonic() - began_s:.2f} s")
    await stage.judge(may_be_lost=victim == "decode0" and fault != "cut")


async def _apart(stage: Stage, left: tuple[str, ...]) -> bool:
    """Each of those that are left has no link to the other."""
    for node in left:
        other = "decode0" if node == "prefill0" else "prefill0"
        rows = (await stage.cluster.ask(node, "peers"))["peers"]
        if any(row["node"] == other and row["state"] == "up" for row in rows):
            return False
    return True


async def mend(stage: Stage, fault: str, victim: str, pair: Namespaces | None) -> None:
    if fault == "SIGKILL":
        await stage.cluster.start(victim)
        await stage.cluster.wait_ready()
    elif fault == "SIGSTOP":
        stage.signal(victim, signal.SIGCONT)
    elif pair is not None:
        pair.mend()
    await stage.heals()
    await stage.settled("prefill0", "decode0")


@asynccontextmanager
async def stage_of(
    make_cluster: MakeCluster, model: Path, toy: Toy, pair: Namespaces | None, same_host: str
) -> AsyncIterator[Stage]:
    replica = {"kv_bytes": "96 MiB", "chunk_tokens": 1024}
    within: dict[str, list[str]] = {}
    if pair is None:
        nodes = nodes_here(**replica)
    else:
        nodes, within = nodes_in(pair, **replica)
        within["front0"] = within["decode0"]
    nodes["prefill0"]["replicas"][0]["max_sequences"] = 2
    nodes["decode0"]["replicas"][0]["max_sequences"] = 3
    nodes["front0"] = {
        "control_port": free_ports(1)[0],
        "host": nodes["decode0"].get("host", "127.0.0.1"),
        "http": nodes["decode0"].pop("http"),
    }
    async with make_cluster(nodes, model, within=within, fabric={"same_host": same_host}, **SECTIONS) as cluster:
        stage = Stage(cluster, toy)
        try:
            yield stage
        finally:
            for node in list(stage.stopped):
                stage.signal(node, signal.SIGCONT)


ALL = [
    (scene, victim)
    for scene in SCENES
    for victim in scene.victims
]  # fmt: skip
CHOSEN = os.environ.get("PDD_CHAOS_STATES", time.strftime("%j"))
"""Another one every day."""


def drawn(fault: str, same_host: str) -> list[tuple[Scene, str]]:
    found = [(scene, victim) for scene, victim in ALL if fault != "cut" or victim == "prefill0"]
    if CHOSEN == "all":
        return found
    few = random.Random(f"{CHOSEN} {fault}").sample(found, -(-len(found) // 3))
    return few if fault == "cut" else few[same_host == "copy" :: 2]


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "same_host"), [*((fault, "fabric") for fault in FAULTS), ("SIGKILL", "copy"), ("SIGSTOP", "copy")]
)
async def test_the_other_side_fails_in_every_state(
    make_cluster: MakeCluster,
    wide_toy: Path,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    fault: str,
    same_host: str,
) -> None:
    pair: Namespaces | None = request.getfixturevalue("pair") if fault == "cut" else None
    toy = Toy(tmp_path / "cache", wide_toy)
    async with stage_of(make_cluster, wide_toy, toy, pair, same_host) as stage:
        for scene, victim in drawn(fault, same_host):
            print(f"PDD_CHAOS_STATES={CHOSEN}: {fault} of {victim} in {scene.pairs}")
            await stage.reach(scene)
            await strike(stage, fault, victim, pair)
            await mend(stage, fault, victim, pair)
