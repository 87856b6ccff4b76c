"""Two cables between the machines of a prefiller and a decoder, and a NIC of each rank on both: one may fail.

The control link goes over the first cable; the second carries nothing but pages, in one test all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from cluster import HANDOFF_ALL, Cluster, MakeCluster, counters, eventually, prompt, text_of, wait_for_state
from expected import Toy
from namespaces import Namespaces, NoNamespaces, namespaces_or_skip, nodes_in
from wide_toy import wide_toy

from pdd.control import commands

__all__ = ["wide_toy"]

PROMPT_TOKENS = 1025
SECTIONS = {
    "handoff": {**HANDOFF_ALL, "lease_s": 10.0},
    "cluster": {"heartbeat_s": 0.2, "silence_s": 1.5},
}
HEALED_S = 60.0
"""A link that has failed a few times is tried again after up to 30 s."""


@pytest.fixture
def pair() -> Iterator[Namespaces]:
    with namespaces_or_skip(num_cables=2) as found:
        yield found


class Talk:
    """Prompts, each with another beginning, and what the toy answers."""

    def __init__(self, cluster: Cluster, toy: Toy) -> None:
        self.cluster = cluster
        self._toy = toy
        self._num_asked = 0

    def ask(self) -> asyncio.Task[None]:
        self._num_asked += 1
        return asyncio.create_task(self._answered(prompt(PROMPT_TOKENS, self._num_asked)))

    async def _answered(self, ids: list[int]) -> None:
        answer = await self.cluster.complete(ids, max_tokens=2, ignore_eos=True)
        assert answer["choices"][0]["text"] == self._toy.text(ids, 2)

    async def handed_off(self) -> None:
        """Until a prompt's pages have arrived from the prefiller."""

        async def arrived() -> bool:
            before = (await counters(self.cluster)).get("handoffs[arrived]", 0)
            await self.ask()
            return (await counters(self.cluster)).get("handoffs[arrived]", 0) > before

        await eventually(arrived, HEALED_S, lambda: self.cluster.log("decode0"))

    async def sent_bytes(self) -> list[int]:
        """Of the prefiller's NICs."""
        [replica] = (await self.cluster.ask("prefill0", "status"))["replicas"]
        return [nic["sent_bytes"] for nic in replica["nics"]]

    async def pdctl(self, command: Any) -> str:
        sockets = {"prefill0": self.cluster.run_dir / "prefill0.sock"}
        text: str = (await asyncio.to_thread(command, sockets)).text
        return text

    async def way(self) -> str:
        rows = (await self.cluster.ask("prefill0", "peers"))["peers"]
        [way] = [row["way"] for row in rows if row["node"] == "decode0"]
        return str(way)

    async def until_both_carry(self) -> None:
        before = await self.sent_bytes()

        async def carried() -> bool:
            await self.handed_off()
            grown = [new > old for old, new in zip(before, await self.sent_bytes(), strict=True)]
            return all(grown) and await self.way() == "2 of 2 paths"

        await eventually(carried, HEALED_S, lambda: self.cluster.log("prefill0"))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["cut", "swallow"])
async def test_one_of_two_links_fails_under_a_handoff_and_comes_back(
    make_cluster: MakeCluster, wide_toy: Path, tmp_path: Path, pair: Namespaces, fault: str
) -> None:
    nodes, within = nodes_in(pair, kv_bytes="96 MiB", chunk_tokens=1024, max_sequences=3)
    toy = Toy(tmp_path / "cache", wide_toy)
    async with make_cluster(nodes, wide_toy, within=within, **SECTIONS) as cluster:
        talk = Talk(cluster, toy)
        await talk.until_both_carry()
        with suppress(NoNamespaces):  # without tc the moment is harder to hit
            pair.slow(1, "20mbit")
        asked = [talk.ask() for _ in range(3)]

        async def sending() -> bool:
            rows = (await cluster.ask("prefill0", "requests"))["requests"]
            return any(row["state"] == "transferring" for row in rows)

        await eventually(sending, 20.0, lambda: cluster.log("prefill0"))
        getattr(pair, fault)(1)
        await asyncio.gather(*asked)

        async def noticed() -> bool:
            await talk.handed_off()
            return await talk.way() == "1 of 2 paths"

        await eventually(noticed, HEALED_S, lambda: cluster.log("prefill0"))
        first, second = await talk.sent_bytes()
        for _ in range(2):
            await talk.handed_off()
        assert (await talk.sent_bytes())[0] > first
        assert (await talk.sent_bytes())[1] == second
        assert "1 of 2 paths" in await talk.pdctl(commands.peers)
        [lost] = [line for line in (await talk.pdctl(commands.status)).splitlines() if pair.prefill_hosts[1] in line]
        assert int(lost.split()[-1]) >= 1, lost
        pair.mend(1)
        await talk.until_both_carry()


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["cut", "swallow"])
async def test_pages_do_not_arrive_and_the_control_link_hears_nothing_of_it(
    make_cluster: MakeCluster, slow_toy: Path, tmp_path: Path, pair: Namespaces, fault: str
) -> None:
    """Nobody waits for a lease (60 s), the link stays, and status and peers say what is wrong until it is right."""
    nodes, within = nodes_in(pair)
    for node, hosts in (("prefill0", pair.prefill_hosts), ("decode0", pair.decode_hosts)):
        nodes[node]["replicas"][0]["nics"] = hosts[1:]
    toy = Toy(tmp_path / "cache", slow_toy)
    async with make_cluster(nodes, slow_toy, within=within, handoff=HANDOFF_ALL) as cluster:

        async def reason() -> str:
            status = await cluster.ask("decode0", "status")
            assert status["ready"]
            return str(status["reason"])

        asked = [asyncio.create_task(text_of(cluster, prompt(500, seed), 4)) for seed in range(4)]
        await wait_for_state(cluster, "prefilling")
        getattr(pair, fault)(1)
        async with asyncio.timeout(40.0):
            assert await asyncio.gather(*asked) == [toy.text(prompt(500, seed), 4) for seed in range(4)]
            seed = 4
            while "pages do not arrive from prefill0/0 in decode0/0: writes of" not in await reason():
                assert await text_of(cluster, prompt(100, seed), 4) == toy.text(prompt(100, seed), 4)
                seed += 1
        [row] = (await cluster.ask("decode0", "peers"))["peers"]
        assert (row["state"], row["links"]) == ("up", 1)
        assert "pages do not arrive from prefill0/0" in row["reason"]
        pair.mend(1)

        async def apart() -> bool:
            await text_of(cluster, prompt(40), 1)
            return await reason() == "serving, prefill and decode apart"

        await eventually(apart, HEALED_S, lambda: cluster.log("decode0"))
        assert (await cluster.ask("decode0", "peers"))["peers"][0]["links"] == 1
