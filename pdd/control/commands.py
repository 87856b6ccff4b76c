"""What each pdctl command asks of the daemons, and how it shows what they answered.

A command gets the sockets to ask and returns an Answer: data for JSON and YAML (the same shape for one node and for
many), the text of the table, and what went wrong with nodes that did not answer.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import msgspec

from pdd.base.errors import OperatorError
from pdd.control.client import RefusedError, ask
from pdd.control.render import duration, mebibytes, plain, share, table, to_data
from pdd.control.sockets import UsageError
from pdd.control.story import story_text
from pdd.wire.admin import (
    AdminRequest,
    CancelResult,
    DrainResult,
    KvReport,
    KvReports,
    Peers,
    ReplicaStatus,
    RequestRow,
    Requests,
    Status,
    Stories,
)

Sockets = Mapping[str, Path]
DRAIN_POLL_S = 0.2
"""How often `drain --wait` looks."""
Reply = TypeVar("Reply", bound=msgspec.Struct)


class Answer(msgspec.Struct, frozen=True):
    data: Any
    text: str
    errors: dict[str, OperatorError] = {}
    """By node; the command has failed when there is one, but what the others said is still shown."""


def status(sockets: Sockets) -> Answer:
    replies, errors = _ask_all(sockets, AdminRequest(command="status"), Status)
    nodes = [_node_row(node, found) for node, found in replies.items()]
    replicas = [_replica_row(replica) for found in replies.values() for replica in found.replicas]
    nics = [row for found in replies.values() for replica in found.replicas for row in _nic_rows(replica)]
    counters = [(n, name, value) for n, s in replies.items() for name, value in sorted(s.counters.items()) if value]
    parts = [table(_NODE_HEADER, nodes)]
    if replicas:
        parts.append(table(_REPLICA_HEADER, replicas))
    if nics:
        parts.append(table(_NIC_HEADER, nics))
    if counters:
        parts.append(table(("NODE", "COUNTED SINCE THE START", ""), counters))
    return Answer([to_data(found) for found in replies.values()], _text(parts, replies), errors)


_NODE_HEADER = ("NODE", "STATE", "MODEL", "HTTP", "UP", "PID", "VERSION", "WHY")
_REPLICA_HEADER = (
    *("REPLICA", "ROLE", "STATE", "RUNNING", "QUEUED", "FREE", "CACHED", "QUARANTINED", "PAGES"),
    *("STEPS", "FABRIC", "NICS", "GB/S", "COPIED", "FAILED PATHS", "WHY"),
)
_NIC_HEADER = ("REPLICA", "RANK", "NIC", "ADDRESS", "SENT", "ARRIVED PIECES", "FAILED PATHS")
"""Shown where a rank has several: which of them carries, and which fails."""


def _node_row(node: str, found: Status) -> tuple[object, ...]:
    state = "draining" if found.draining else "ready" if found.ready else "not ready"
    up = duration(found.uptime_s)
    return (node, state, found.model, found.http, up, found.pid, found.version, found.reason)


def _replica_row(replica: ReplicaStatus) -> tuple[object, ...]:
    rate = replica.fabric_gigabytes_per_s
    pages = (replica.free_pages, replica.cached_pages, replica.quarantined_pages, replica.num_pages)
    copied = mebibytes(replica.copied_bytes) if replica.copied_bytes else ""
    failed_paths = sum((nic.failed_paths for nic in replica.nics), replica.failed_copies) if replica.nics else None
    return (
        *(replica.name, replica.role, replica.state, replica.num_running, replica.num_queued, *pages, replica.steps),
        *(replica.provider, len(replica.nics) or None, "" if rate is None else f"{rate:.2f}", copied, failed_paths),
        replica.reason,
    )


def _nic_rows(replica: ReplicaStatus) -> list[tuple[object, ...]]:
    if not any(nic.nic for nic in replica.nics):
        return []
    return [
        (replica.name, nic.rank, nic.nic, nic.host, mebibytes(nic.sent_bytes), nic.arrived_pieces, nic.failed_paths)
        for nic in replica.nics
    ]


def requests(sockets: Sockets) -> Answer:
    replies, errors = _ask_all(sockets, AdminRequest(command="requests"), Requests)
    found = [(node, row) for node, reply in replies.items() for row in reply.requests]
    header = ("NODE", "REQUEST", "SIDE", "STATE", "AGE", "IN STATE", "PROMPT", "ANSWER", "PAGES", "WITH")
    rows = [_request_row(node, row) for node, row in found]
    return Answer(_with_node(found), _text([table(header, rows) if rows else "no requests"], replies), errors)


def _request_row(node: str, row: RequestRow) -> tuple[object, ...]:
    times = (duration(row.age_s), duration(row.state_s))
    return (
        *(node, row.request, row.side, row.state, *times),
        *(row.prompt_tokens, row.output_tokens, row.pages, row.peer),
    )


def story(sockets: Sockets, request: str) -> Answer:
    """Both sides of a request, from every node that took part. Raises RefusedError when nobody knows it."""
    replies, errors = _ask_all(sockets, AdminRequest(command="story", request=request), Stories)
    found = [(node, one) for node, reply in replies.items() for one in reply.stories]
    others = {node: error for node, error in errors.items() if not _not_found(error)}
    if not found and not others:
        raise RefusedError(f"no node knows a request {request}: `pdctl requests` lists the latest", "not_found")
    block = "█" if _can_print("█") else "#"
    found.sort(key=lambda pair: pair[1].side)
    return Answer(_with_node(found), "\n\n".join(story_text(one, node, block) for node, one in found), others)


def cancel(sockets: Sockets, request: str) -> Answer:
    """Cancel where the request is decoded: that side tells its prefiller. Raises UsageError, RefusedError."""
    node = next(iter(sockets))
    if len(sockets) > 1:
        replies, errors = _ask_all(sockets, AdminRequest(command="requests"), Requests)
        found = [(n, r) for n, reply in replies.items() for r in reply.requests if r.request.startswith(request)]
        ids = sorted({row.request for _, row in found})
        if len(ids) > 1:
            raise UsageError(f"{request} is the beginning of {len(ids)} requests, among them {ids[0]} and {ids[1]}")
        if not ids and errors:
            return Answer([], "", errors)
        if not ids:
            raise RefusedError(f"no node knows a request {request}: `pdctl requests` lists the latest", "not_found")
        node = next((n for n, row in found if row.side == "decode"), found[0][0])
    result = ask(sockets[node], AdminRequest(command="cancel", request=request), CancelResult)
    return Answer(_with_node([(node, result)]), f"{plain(result.request)} on {node}: {plain(result.state)}")


def kv(sockets: Sockets) -> Answer:
    replies, errors = _ask_all(sockets, AdminRequest(command="kv"), KvReports)
    found = [(node, report) for node, reply in replies.items() for report in reply.replicas]
    rows = [_pool_row(report) for _, report in found]
    owners = [
        (r.replica, o.owner, o.pages, "quarantined" if o.quarantined else "owned") for _, r in found for o in r.owners
    ]
    problems = [(r.replica, problem) for _, r in found for problem in r.problems]
    header = ("REPLICA", "PAGES", "FREE", "CACHED", "OWNED", "QUARANTINED", "MEMORY", "CACHE HITS")
    parts = [table(header, rows) if rows else "no replicas"]
    if owners:
        parts.append(table(("REPLICA", "OWNER", "PAGES", "STATE"), owners))
    if problems:
        parts.append(table(("REPLICA", "BROKEN INVARIANT"), problems))
        errors = errors | {r: RefusedError(f"a page pool contradicts itself: {p}", "invariant") for r, p in problems}
    return Answer(_with_node(found), _text(parts, replies), errors)


def _pool_row(report: KvReport) -> tuple[object, ...]:
    hits = share(report.hit_tokens / report.queried_tokens) if report.queried_tokens else ""
    pages = (report.num_pages, report.free, report.cached, report.owned, report.quarantined)
    return (report.replica, *pages, mebibytes(report.page_bytes * report.num_layers * report.num_pages), hits)


def peers(sockets: Sockets) -> Answer:
    replies, errors = _ask_all(sockets, AdminRequest(command="peers"), Peers)
    found = [(node, row) for node, reply in replies.items() for row in reply.peers]
    rows = [
        (
            node,
            p.node,
            p.address,
            p.state,
            duration(p.silent_s),
            p.links,
            p.way,
            " ".join(p.replicas),
            p.incarnation,
            p.reason,
        )
        for node, p in found
    ]
    header = ("NODE", "PEER", "ADDRESS", "STATE", "SILENT", "LINKS", "PAGES GO BY", "REPLICAS", "INCARNATION", "WHY")
    data = [{"node": node, "peer": p.node, **{k: v for k, v in to_data(p).items() if k != "node"}} for node, p in found]
    return Answer(data, _text([table(header, rows) if rows else "no peers"], replies), errors)


def drain(sockets: Sockets, wait: bool) -> Answer:
    """One node takes no new requests; with `wait`, until it has none unfinished any more. Raises UsageError when it is
    not said which node, RefusedError when somebody resumes it meanwhile."""
    node, path = _only(sockets)
    result = ask(path, AdminRequest(command="drain"), DrainResult)
    if wait:
        result = _wait_until_drained(node, path, result)
    return _drained(node, result)


def resume(sockets: Sockets) -> Answer:
    """Takes requests again. Raises UsageError when it is not said which node."""
    node, path = _only(sockets)
    return _drained(node, ask(path, AdminRequest(command="resume"), DrainResult))


def _wait_until_drained(node: str, path: Path, result: DrainResult) -> DrainResult:
    told = None
    while result.unfinished:
        if result.unfinished != told:
            told = result.unfinished
            print(f"{node}: {told} unfinished", file=sys.stderr, flush=True)
        sleep(DRAIN_POLL_S)
        found = ask(path, AdminRequest(command="status"), Status)  # another `drain` would undo a resume
        if not found.draining:
            raise RefusedError(f"{node} was resumed with {found.unfinished} unfinished", "resumed")
        result = DrainResult(draining=found.draining, unfinished=found.unfinished)
    return result


def _drained(node: str, result: DrainResult) -> Answer:
    state = "takes no new requests" if result.draining else "takes requests"
    return Answer(_with_node([(node, result)]), f"{node} {state}; {result.unfinished} unfinished")


def _only(sockets: Sockets) -> tuple[str, Path]:
    if len(sockets) > 1:
        raise UsageError(f"say which node: --node {' | '.join(sockets)}")
    [(node, path)] = sockets.items()
    return node, path


def _ask_all(
    sockets: Sockets, request: AdminRequest, kind: type[Reply]
) -> tuple[dict[str, Reply], dict[str, OperatorError]]:
    replies: dict[str, Reply] = {}
    errors: dict[str, OperatorError] = {}
    for node, path in sockets.items():
        try:
            replies[node] = ask(path, request, kind)
        except OperatorError as error:
            errors[node] = error
    return replies, errors


def _not_found(error: OperatorError) -> bool:
    return isinstance(error, RefusedError) and error.reason == "not_found"


def _with_node(pairs: list[tuple[str, Any]]) -> list[dict[str, Any]]:
    return [{"node": node, **to_data(value)} for node, value in pairs]


def _text(parts: list[str], replies: Mapping[str, object]) -> str:
    """Nothing where nobody answered: then the errors say it all."""
    return "\n\n".join(parts) if replies else ""


def _can_print(character: str) -> bool:
    try:
        character.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
