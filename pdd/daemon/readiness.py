"""Whether a node can serve now, and what stands in the way: for /ready, pdctl, systemd and the gauge."""

from __future__ import annotations

from collections.abc import Iterator

from pdd.daemon.node import Node
from pdd.lifecycle.request import Readiness
from pdd.topology.model import OnHandoffFailure, Role

_PREFILL_ROLES = frozenset({Role.PREFILL.value})
_DECODE_ROLES = frozenset({Role.DECODE.value, Role.COLOCATED.value})


def readiness(node: Node) -> Readiness:
    """The first thing that stands in the way, or how it serves."""
    obstacle = next(_obstacles(node), None)
    if obstacle is not None:
        return Readiness(False, obstacle)
    if not _hands_off(node):
        return Readiness(True, "serving")
    prefillers = {it.name for it in node.peers.candidates(_PREFILL_ROLES)}
    if not prefillers:
        return Readiness(True, f"{_without_prefiller(node)}: prompts are prefilled on the decoder")
    broken = {theirs: reason for theirs, reason in node.peers.paths.broken() if theirs in prefillers}
    why = "; ".join(broken.values())
    if broken.keys() == prefillers:
        return Readiness(True, f"{why}; prompts are prefilled on the decoder")
    return Readiness(True, f"serving, prefill and decode apart{f', but {why}' if why else ''}")


def standstill(node: Node) -> str | None:
    """What makes no progress although it should: the event loop, or an executor that was not even replaced. None: all
    is moving. A daemon of which this is true for long cannot help itself: the watchdog is not fed."""
    silence_s = node.topology.cluster.silence_s
    if node.late_s > silence_s:  # by now our peers hold us for lost
        return f"the node's event loop is late by {node.late_s:.1f} s"
    for replica in node.replicas.values():
        if replica.asked is not None and replica.silent_s > replica.asked.limit_s:
            return f"an executor of {replica.name} has not answered for {replica.silent_s:.0f} s"
    return None


def _obstacles(node: Node) -> Iterator[str]:
    if node.draining:
        yield "draining: no new requests are taken"
    if node.starting:
        yield "replicas of this node are starting"
    for name, reason in node.down.items():
        yield f"replica {name} is down: {reason}"
    if stuck := standstill(node):
        yield stuck
    if _hands_off(node) and not node.peers.candidates(_PREFILL_ROLES):
        if Role.PREFILL not in node.peers.seen_roles:
            yield f"{_without_prefiller(node)}; none has been since the start"
        if node.topology.handoff.on_failure is OnHandoffFailure.ERROR:
            yield _without_prefiller(node)
    if node.topology.nodes[node.name].http is not None and not node.peers.candidates(_DECODE_ROLES):
        yield "no decode replica is reachable"


def _hands_off(node: Node) -> bool:
    """Whether this node decodes what others are to prefill."""
    wanted = {replica.role for one in node.topology.nodes.values() for replica in one.replicas}
    return Role.PREFILL in wanted and any(it.role is Role.DECODE for it in node.replicas.values())


def _without_prefiller(node: Node) -> str:
    refused = [reason for peer in node.peers for reason in peer.refused.values()]
    return f"no prefiller is reachable{': ' + refused[0] if refused else ''}"
