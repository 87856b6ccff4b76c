"""`pdctl topology`: what a file says, before any daemon reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from pdd.base.errors import TopologyInvalid
from pdd.base.ids import ReplicaName, set_name
from pdd.control.commands import Answer
from pdd.control.render import as_json, mebibytes, table, to_data
from pdd.topology.check import warnings
from pdd.topology.discover import propose
from pdd.topology.discover_sysfs import SYSFS, read_machine, restricted
from pdd.topology.discover_yaml import topology_text
from pdd.topology.load import load
from pdd.topology.model import Replica, Role, Topology
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


def discover(sysfs: str, role: str) -> Answer:
    """A topology for the machine whose sysfs it is; on this one, for the CPUs that this process may use.

    Raises OperatorError where it is no sysfs.
    """
    machine = read_machine(Path(sysfs))
    if Path(sysfs) == SYSFS:
        machine = restricted(machine, os.sched_getaffinity(0))
    ranks = propose(machine)
    text = topology_text(machine, ranks, Role(role)).rstrip("\n")
    return Answer({"machine": to_data(machine), "ranks": [to_data(rank) for rank in ranks]}, text)


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
            for one, ranks in _sets(name, replica):
                shown = f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"
                nics = (
                    " ".join("+".join(replica.nics_by_rank[rank]) for rank in ranks if replica.nics_by_rank) or "auto"
                )
                memory = (replica.page_tokens, kv, replica.chunk_tokens)
                rows.append((one, replica.role, shown, address, http, nics, cores, _progress(replica, ranks), *memory))
        if not node.replicas:
            rows.append((node_name, "frontend", "", address, http, "", "", "", None, "", None))
    places = ("REPLICA", "ROLE", "RANKS", "CONTROL", "HTTP", "NICS", "CORES", "PROGRESS CORES")
    return table((*places, "PAGE TOKENS", "KV", "CHUNK TOKENS"), rows)


def _progress(replica: Replica, ranks: range) -> str:
    by_rank = replica.progress_cores_by_rank
    if by_rank is None:
        return "auto"
    return " ".join("+".join(map(str, by_rank[rank])) for rank in ranks) if by_rank else "all"


def _sets(name: ReplicaName, replica: Replica) -> Iterator[tuple[ReplicaName, range]]:
    """The replica sets with their ranks: what daemons and their peers name."""
    tp, dp = replica.parallel.tp, replica.parallel.dp
    for dp_rank in range(dp):
        yield set_name(name, dp_rank, dp), range(dp_rank * tp, (dp_rank + 1) * tp)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")
