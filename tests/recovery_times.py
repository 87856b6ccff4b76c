"""How long clients feel the death of a prefiller: `PYTHONPATH=. python tests/recovery_times.py [KILLS]`.

Two toy prefillers and a decoder under steady load. Again and again a prefiller is killed with SIGKILL; right after it a
new request is sent, and its time to the last token taken. Then the prefiller is started again.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from cluster import HANDOFF_ALL, TOY_MODEL, Cluster, free_ports, prefill_and_decode

NUM_CLIENTS = 4
BODY = {"max_tokens": 4, "ignore_eos": True}


async def timed(cluster: Cluster) -> float:
    ids = [random.randrange(250) for _ in range(300)]  # in no prefix cache
    loop = asyncio.get_running_loop()
    start_s = loop.time()
    await cluster.complete(ids, **BODY)
    return loop.time() - start_s


async def load(cluster: Cluster, seconds: list[float]) -> None:
    while True:
        seconds.append(await timed(cluster))


async def measure(cluster: Cluster, num_kills: int) -> None:
    usual: list[float] = []
    clients = [asyncio.create_task(load(cluster, usual)) for _ in range(NUM_CLIENTS)]
    after: list[float] = []
    for kill in range(num_kills):
        await asyncio.sleep(1.0)  # let the load reach both prefillers
        victim = f"prefill{kill % 2}"
        cluster.daemons[victim].kill()
        after.append(await timed(cluster))
        await cluster.daemons[victim].wait()
        await cluster.start(victim)
        await cluster.wait_ready()
    for client in clients:
        client.cancel()
    await asyncio.gather(*clients, return_exceptions=True)
    await cluster.settled()
    for name, seconds in (("after a kill", after), ("all under load", usual)):
        p99 = sorted(seconds)[max(0, -(-len(seconds) * 99 // 100) - 1)]
        print(f"{name}: {len(seconds)} requests, p50 {statistics.median(seconds):.3f} s, p99 {p99:.3f} s, "
              f"max {max(seconds):.3f} s")  # fmt: skip


async def main(num_kills: int) -> None:
    nodes: dict[str, Any] = prefill_and_decode()
    [control] = free_ports(1)
    nodes = {"prefill0": nodes["prefill0"], "prefill1": {**nodes["prefill0"], "control_port": control}, **nodes}
    with tempfile.TemporaryDirectory(prefix="pdd-kills") as name:
        cluster = Cluster(Path(name), nodes, TOY_MODEL, Path(name) / "cache", handoff=HANDOFF_ALL)
        try:
            await cluster.start()
            await cluster.wait_ready()
            await measure(cluster, num_kills)
        finally:
            await cluster.close()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]) if len(sys.argv) > 1 else 20))
