"""`pdctl topology`: what a file says, before any daemon reads it."""

from __future__ import annotations

from pathlib import Path

from pdd.base.errors import TopologyInvalid
from pdd.control.commands import Answer
from pdd.control.render import as_json, mebibytes, table, to_data
from pdd.topology.check import warnings
from pdd.topology.load import load
from pdd.topology.model import Role, Topology
from pdd.topology.schema import schema


def check(path: str) -> Answer:
    """Every fault of the file, or what it describes. The data is complete in both cases."""
    try:
        topology = load(Path(path))
    except TopologyInvalid as error:
        return Answer({"valid": False, "faults": str(error).split("\n"), "warnings": []}, "", {"": error})
    found = warnings(topology)
    roles = [replica.role for node in topology.nodes.values() for replica in node.replicas]
    counts = ", ".join(f"{roles.count(role)} {role}" for role in Role if role in roles)
    lines = [f"{path}: valid: {_count(len(topology.nodes), 'node')}; replicas: {counts}"]
    lines += [f"warning: {text}" for text in found]
    return Answer({"valid": True, "faults": [], "warnings": found}, "\n".join(lines))


def show(path: str) -> Answer:
    """The topology as daemons will read it: defaults filled in, paths made absolute. Raises TopologyInvalid."""
    topology = load(Path(path))
    model = topology.model
    head = (
        f"cluster {topology.cluster.name}: {model.name} ({model.dtype}) over {topology.fabric.provider}, {model.path}"
    )
    return Answer(to_data(topology), f"{head}\n\n{_replicas(topology)}")


def print_schema() -> Answer:
    return Answer(schema(), as_json(schema()))


def _replicas(topology: Topology) -> str:
    rows: list[tuple[object, ...]] = []
    for node_name, node in topology.nodes.items():
        http = f"{node.http.host}:{node.http.port}" if node.http else ""
        address = f"{node.host}:{node.control_port}"
        for name, replica in topology.replicas(node_name).items():
            cores = " ".join(map(str, replica.cores)) or "all"
            kv = mebibytes(replica.kv_bytes)
            rows.append((name, replica.role, address, http, cores, replica.page_tokens, kv, replica.chunk_tokens))
        if not node.replicas:
            rows.append((node_name, "frontend", address, http, "", None, "", None))
    return table(("REPLICA", "ROLE", "CONTROL", "HTTP", "CORES", "PAGE TOKENS", "KV", "CHUNK TOKENS"), rows)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
