"""`pdd soak`: a cluster of the toy model under mixed traffic while its processes are killed, stopped and restarted.

Clients ask the HTTP ports of all decoders, faults hit every process, an oracle knows what each answer must be. When the
traffic has ended, every page, descriptor and process has to be back.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import secrets
import shutil
import tempfile
import time
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import structlog
import yaml

from pdd.base.errors import OperatorError
from pdd.base.ids import NodeName
from pdd.bench.chaos import KINDS, Chaos
from pdd.bench.machine import describe, this_machine
from pdd.bench.toy_cluster import SECTIONS, ToyCluster, Unanswered, Vitals, two_by_two
from pdd.bench.traffic import Asks, Oracle, Traffic
from pdd.topology.model import SameHost
from pdd.wire import admin

log = structlog.get_logger(__name__)

SETTLE_S = SECTIONS["handoff"]["lease_s"] + 10
MAX_NEW_FDS = 16
MAX_GROWTH_BYTES = 96 * 2**20
"""Of a daemon that ran throughout, from before the traffic to after it: stories and caches fill up, then stay."""
NUM_SHOWN = 5


class Report(msgspec.Struct, frozen=True, kw_only=True):
    seed: int
    duration_s: float
    outcomes: dict[str, int]
    faults: dict[str, int]
    wrong: int
    leaks: list[str]
    problems: list[str]
    """What else must not happen: answers that never end, faults that are not recovered from, tracebacks."""
    around_s: dict[str, list[float]]
    back_s: dict[str, list[float]]
    pages_s: list[float]
    """Seconds from the death of a decoder until the prefillers had the pages back that they held for it."""
    counters: dict[str, int]
    """Of all nodes together, since their last start."""

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.leaks or self.problems)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=5.0, help="how long faults are injected (default 5)")
    parser.add_argument("--seed", type=int, help="of requests and faults; default: a new one, which is printed")
    parser.add_argument("--topology", type=Path, help="its nodes are run, on loopback; default: two of each role")
    parser.add_argument("--same-host", choices=[*map(str, SameHost)], default="copy",
                        help="how pages go: copy (default), or fabric, as between machines")  # fmt: skip
    parser.add_argument("--clients", type=int, default=8, help="requests at once (default 8)")
    parser.add_argument("--fault-pause-s", type=float, default=2.0, help="mean pause between faults (default 2)")
    parser.add_argument("--only", action="append", choices=KINDS, help="this kind of fault; may be given again")
    parser.add_argument("--apart", action="store_true", help="no fault before the one before it is over everywhere")
    parser.add_argument("--keep", action="store_true", help="keep logs; they are always kept when something is wrong")


def run(args: argparse.Namespace) -> int:
    """Exit codes: 0 all well, 1 wrong answers, leaks or other problems. Raises PddError."""
    seed = args.seed if args.seed is not None else secrets.randbelow(2**32)
    print(f"seed {seed}; {describe(this_machine())}", flush=True)
    directory = Path(tempfile.mkdtemp(prefix="pdd-soak-"))
    structlog.configure(logger_factory=structlog.PrintLoggerFactory((directory / "soak.log").open("w")))
    report = asyncio.run(_soak(directory, _nodes(args.topology), args, seed))
    print(_text(report))
    if report.failed or args.keep:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory)
    return 1 if report.failed else 0


def _nodes(file: Path | None) -> dict[str, Any]:
    if file is None:
        return two_by_two()
    try:
        nodes: dict[str, Any] = yaml.safe_load(file.read_text())["nodes"]
    except (OSError, yaml.YAMLError, LookupError, TypeError) as error:
        raise OperatorError(f"{file} has no nodes that can be read: {error}") from error
    return nodes


async def _soak(directory: Path, nodes: dict[str, Any], args: argparse.Namespace, seed: int) -> Report:
    rng = random.Random(seed)  # noqa: S311 - not for secrets
    cluster = ToyCluster(directory, nodes, SameHost(args.same_host))
    page_tokens = next(replica.page_tokens for node in cluster.topology.nodes.values() for replica in node.replicas)
    oracle = Oracle(cluster.model.config, page_tokens)
    traffic = Traffic(list(cluster.urls.values()), Asks(rng, oracle), oracle, rng)
    lasting = {[node for node in cluster.nodes if cluster.role(node) == role][-1] for role in ("prefill", "decode")}
    at_once = 1 if args.apart else len(cluster.nodes)
    chaos = Chaos(
        cluster, traffic, rng,
        pause_s=args.fault_pause_s, lasting=lasting, at_once=at_once, kinds=args.only or KINDS,
    )  # fmt: skip
    began_s = time.monotonic()
    try:
        for node in cluster.nodes:
            await cluster.start(node)
        await asyncio.gather(*(cluster.wait_ready(node) for node in cluster.nodes))
        before = {node: cluster.vitals(node) for node in lasting}
        until_s = time.monotonic() + 60 * args.minutes
        await asyncio.gather(chaos.run(until_s), *(traffic.client(until_s) for _ in range(args.clients)))
        leaks = await _leaks(cluster, before)
        leaks += [f"executor {pid} outlived its daemon" for pid in chaos.orphans()]
        problems = chaos.problems + await _problems(cluster, traffic)
        counters = await _counters(cluster)
    finally:
        await traffic.close()
        codes = await cluster.close()
    problems += [f"{node} ended with exit code {code} at the end" for node, code in codes.items() if code]
    for wrong in traffic.wrong:
        log.error("wrong answer", **msgspec.structs.asdict(wrong))
    return Report(
        seed=seed, duration_s=time.monotonic() - began_s, outcomes=dict(traffic.outcomes.most_common()),
        faults=dict(sorted(chaos.injected.items())), wrong=len(traffic.wrong), leaks=leaks, problems=problems,
        around_s=chaos.around_s, back_s=chaos.back_s, pages_s=chaos.pages_s, counters=counters,
    )  # fmt: skip


async def _leaks(cluster: ToyCluster, before: dict[NodeName, Vitals]) -> list[str]:
    """Once nothing runs any more: what was not given back."""
    until_s = time.monotonic() + SETTLE_S
    while (held := await _held(cluster)) and time.monotonic() < until_s:  # noqa: ASYNC110 - other processes set no event
        await asyncio.sleep(0.1)
    for node, old in before.items():
        new = cluster.vitals(node)
        log.info("vitals", node=node, before=msgspec.to_builtins(old), after=msgspec.to_builtins(new))
        if new.num_fds > old.num_fds + MAX_NEW_FDS:
            held.append(f"{node} has {new.num_fds} open files, {old.num_fds} before the traffic")
        if new.rss_bytes > old.rss_bytes + MAX_GROWTH_BYTES:
            held.append(f"{node} has {new.rss_bytes >> 20} MiB resident, {old.rss_bytes >> 20} before the traffic")
    return held


async def _held(cluster: ToyCluster) -> list[str]:
    found = []
    for node in cluster.nodes:
        try:
            status = await cluster.ask(node, "status", admin.Status)
            pools = (await cluster.ask(node, "kv", admin.KvReports)).replicas
        except Unanswered as error:
            found.append(str(error))
            continue
        found += [f"{it.name} still runs {it.num_running}, queues {it.num_queued}" for it in status.replicas
                  if it.num_running or it.num_queued]  # fmt: skip
        found += [f"{it.replica} owns {it.owned} pages, {it.quarantined} in quarantine: {it.owners}" for it in pools
                  if it.owned or it.quarantined]  # fmt: skip
        found += [f"{it.replica}: {problem}" for it in pools for problem in it.problems]
    return found


async def _problems(cluster: ToyCluster, traffic: Traffic) -> list[str]:
    found = [f"{traffic.outcomes[bad]} answers {bad}" for bad in ("hung", "ended early") if traffic.outcomes[bad]]
    found += [f"{number} answers {outcome}: a fault of ours" for outcome, number in traffic.outcomes.items()
              if "internal_error" in outcome]  # fmt: skip
    for node in cluster.nodes:
        if number := cluster.num_tracebacks(node):
            found.append(f"{number} tracebacks in the log of {node}")
        counters = (await cluster.ask(node, "status", admin.Status)).counters
        if number := counters.get("broken_invariants", 0):
            found.append(f"{number} broken invariants on {node}")
    return found


async def _counters(cluster: ToyCluster) -> dict[str, int]:
    total: dict[str, int] = {}
    for node in cluster.nodes:
        for name, number in (await cluster.ask(node, "status", admin.Status)).counters.items():
            if name.startswith(("handoffs", "prefill_decisions", "preemptions", "strays")):
                total[name] = total.get(name, 0) + number
    return dict(sorted(total.items()))


def _text(report: Report) -> str:
    lines = [f"{sum(report.outcomes.values())} requests, {report.duration_s / 60:.1f} minutes"]
    lines += [f"  {number:7}  {outcome}" for outcome, number in report.outcomes.items()]
    lines.append(f"{sum(report.faults.values())} faults; seconds until the next answer, p50 / p99 (number)")
    lines.append(f"  {'':7}  {'':28}{'around it':24}through it")
    for name, number in report.faults.items():
        around, back = (_percentiles(found.get(name, [])) for found in (report.around_s, report.back_s))
        lines.append(f"  {number:7}  {name:28}{around:24}{back}")
    both = [list(chain(*found.values())) for found in (report.around_s, report.back_s)]
    lines.append(f"  {'':7}  {'all':28}{_percentiles(both[0]):24}{_percentiles(both[1])}")
    lines.append(f"pages that prefillers held for a killed decoder, free after: {_percentiles(report.pages_s)}")
    lines.append("since the last start of each node:")
    lines += [f"  {number:7}  {name}" for name, number in report.counters.items()]
    lines.append(f"wrong answers: {report.wrong}")
    for title, found in (("leaks", report.leaks), ("other problems", report.problems)):
        lines.append(f"{title}: {len(found)}")
        lines += [f"  {one}" for one in found[:NUM_SHOWN]]
    return "\n".join(lines)


def _percentiles(found: list[float]) -> str:
    if not found:
        return "-"
    p50, p99 = np.percentile(found, (50, 99))
    return f"{p50:.2f} / {p99:.2f} ({len(found)})"
