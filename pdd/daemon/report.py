"""Answers to pdctl: what a node knows of itself, in the words of wire/admin.py."""

from __future__ import annotations

import os
from collections.abc import Callable

import msgspec

import pdd
from pdd.base.errors import BadRequest, GoingDown
from pdd.base.ids import Incarnation, NodeName, ReplicaName, RequestId, is_of
from pdd.daemon.metrics import Metrics
from pdd.daemon.node import Node
from pdd.daemon.readiness import readiness
from pdd.daemon.replica_set import ReplicaSet
from pdd.topology.model import Role
from pdd.wire import admin


async def answer(node: Node, request: admin.AdminRequest) -> msgspec.Struct:
    """Performs one command. Raises BadRequest for an unknown one, NotFound for an unknown request id."""
    command = _COMMANDS.get(request.command)
    if command is None:
        raise BadRequest(f"unknown command {request.command!r}; there are {', '.join(_COMMANDS)}")
    return command(node, request)


def status(node: Node) -> admin.Status:
    state = readiness(node)
    http = node.topology.nodes[node.name].http
    return admin.Status(
        node=node.name,
        incarnation=node.incarnation,
        version=pdd.__version__,
        pid=os.getpid(),
        uptime_s=node.clock.now_s() - node.started_s,
        ready=state.ready,
        reason=state.reason,
        model=node.topology.model.name,
        http=http.url if http else None,
        draining=node.draining,
        unfinished=node.num_unfinished,
        replicas=(
            *(_replica(replica) for replica in node.replicas.values()),
            *(_down(node, name) for name in node.down if name not in node.replicas),
        ),
        counters=counters(node.metrics) | _link_faults(node),
    )


def health(node: Node) -> dict[str, object]:
    """The status as plain JSON values, for /health."""
    plain = msgspec.to_builtins(status(node))
    assert isinstance(plain, dict)
    return plain


def counters(metrics: Metrics) -> dict[str, int]:
    """Every counter that is not zero, by name and labels."""
    counted: dict[str, int] = {}
    for family in metrics.registry.collect():
        for sample in family.samples if family.type == "counter" else ():
            if sample.name.endswith("_total") and sample.value:
                labels = ",".join(sample.labels.values())
                name = sample.name.removeprefix("pdd:").removesuffix("_total")
                counted[f"{name}[{labels}]" if labels else name] = int(sample.value)
    return counted


def _link_faults(node: Node) -> dict[str, int]:
    faults = msgspec.structs.asdict(node.links.counters)
    return {f"link_faults[{kind}]": number for kind, number in faults.items() if number}


def refresh_gauges(node: Node) -> None:
    """Sets the gauges that are read off the state rather than kept up with it."""
    node.metrics.ready.set(readiness(node).ready)
    for kind, number in msgspec.structs.asdict(node.links.counters).items():
        node.metrics.link_faults.labels(kind).set(number)
    for replica in node.replicas.values():
        for kind, number in msgspec.structs.asdict(replica.transfer_counters).items():
            node.metrics.transfer_oddities.labels(replica.name, kind).set(number)
        for kind, number in replica.fabric_counters().items():
            node.metrics.fabric.labels(replica.name, kind).set(number)
        pool = replica.pool
        for use, num_pages in (
            ("free", pool.num_free),
            ("cached", pool.num_cached),
            ("owned", pool.num_owned),
            ("quarantined", pool.num_quarantined),
        ):
            node.metrics.pages.labels(replica.name, use).set(num_pages)
        node.metrics.prefix_cache_tokens.labels(replica.name, "looked up").set(pool.num_looked_up_tokens)
        node.metrics.prefix_cache_tokens.labels(replica.name, "hit").set(pool.num_hit_tokens)


def _replica(replica: ReplicaSet) -> admin.ReplicaStatus:
    pool = replica.pool
    return admin.ReplicaStatus(
        name=replica.name,
        role=replica.role,
        state="ready" if replica.failure is None else "failed",
        reason=replica.failure or "",
        num_queued=replica.admission.num_waiting,
        num_running=replica.admission.num_admitted,
        free_pages=pool.num_free,
        cached_pages=pool.num_cached,
        quarantined_pages=pool.num_quarantined,
        num_pages=pool.num_pages,
        steps=replica.num_steps,
        provider=replica.provider,
        nics=replica.nics(),
        copied_bytes=replica.copied_bytes,
        failed_copies=replica.failed_copies,
        fabric_gigabytes_per_s=replica.gigabytes_per_s,
    )


def _down(node: Node, name: ReplicaName) -> admin.ReplicaStatus:
    """A replica that has failed and is not up again: it has no pages."""
    return admin.ReplicaStatus(
        name=name,
        role=node.topology.replicas(node.name)[name].role,
        state="failed",
        reason=node.down[name],
        num_queued=0,
        num_running=0,
        free_pages=0,
        cached_pages=0,
        quarantined_pages=0,
        num_pages=0,
        steps=0,
        provider="",
        nics=(),
        copied_bytes=0,
        failed_copies=0,
        fabric_gigabytes_per_s=None,
    )


def _kv(replica: ReplicaSet) -> admin.KvReport:
    pool = replica.pool
    owners = [admin.PageOwner(owner=owner, pages=pages, quarantined=False) for owner, pages in pool.owners().items()]
    owners += [admin.PageOwner(owner=it, pages=pages, quarantined=True) for it, pages in pool.quarantines().items()]
    return admin.KvReport(
        replica=replica.name,
        num_pages=pool.num_pages,
        page_bytes=replica.layout.page_bytes,
        num_layers=replica.layout.num_layers,
        free=pool.num_free,
        cached=pool.num_cached,
        owned=pool.num_owned,
        quarantined=pool.num_quarantined,
        owners=tuple(owners),
        hit_tokens=pool.num_hit_tokens,
        queried_tokens=pool.num_looked_up_tokens,
        problems=tuple(replica.problems()),
    )


def _peers(node: Node) -> tuple[admin.PeerRow, ...]:
    """The links' rows, with the reason why replicas of a peer that is up do not fit ours."""
    rows = []
    for row in node.links.rows():
        peer = next((it for it in node.peers if it.node == row.node), None)
        refused = "; ".join(f"{name}: {why}" for name, why in peer.refused.items()) if peer else ""
        broken = [reason for theirs, reason in node.peers.paths.broken() if is_of(theirs, NodeName(row.node))]
        refused = "; ".join([refused, *broken] if refused else broken)
        way = ", ".join(_ways(node, peer.incarnation)) if peer else ""
        rows.append(msgspec.structs.replace(row, reason=refused or row.reason, way=way))
    return tuple(rows)


def _ways(node: Node, peer: Incarnation) -> list[str]:
    """How pages go to that peer from here; each way once."""
    reached = [
        info
        for replica in node.replicas.values()
        if replica.role is Role.PREFILL and replica.failure is None
        for info in replica.messenger.ways(peer)
    ]
    return sorted({"copy" if it.copies else f"{it.num_open} of {it.num_paths} paths" for it in reached})


def _cancel(node: Node, prefix: str) -> admin.CancelResult:
    story = node.stories.find(node.running(), prefix, node.clock.now_s())[0]
    node.cancel(RequestId(story.request), "cancelled by an operator")
    story = node.stories.find(node.running(), story.request, node.clock.now_s())[0]
    return admin.CancelResult(request=story.request, state=story.lines[-1].state)


def _id(request: admin.AdminRequest) -> str:
    if not request.request:
        raise BadRequest(f"{request.command} needs a request id", param="request")
    return request.request


def _drain(node: Node, request: admin.AdminRequest) -> admin.DrainResult:
    if request.command == "resume" and node.stopping:
        raise GoingDown(f"node {node.name} has received a signal and is stopping: start it again instead")
    node.drain(request.command == "drain")
    return admin.DrainResult(draining=node.draining, unfinished=node.num_unfinished)


def _requests(node: Node) -> admin.Requests:
    return admin.Requests(requests=node.stories.rows(node.running(), node.clock.now_s()))


def _stories(node: Node, prefix: str) -> admin.Stories:
    return admin.Stories(stories=node.stories.find(node.running(), prefix, node.clock.now_s()))


_COMMANDS: dict[str, Callable[[Node, admin.AdminRequest], msgspec.Struct]] = {
    "status": lambda node, _: status(node),
    "requests": lambda node, _: _requests(node),
    "story": lambda node, request: _stories(node, _id(request)),
    "cancel": lambda node, request: _cancel(node, _id(request)),
    "kv": lambda node, _: admin.KvReports(replicas=tuple(_kv(replica) for replica in node.replicas.values())),
    "peers": lambda node, _: admin.Peers(peers=_peers(node)),
    "drain": _drain,
    "resume": _drain,
}
