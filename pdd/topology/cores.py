"""Before any request: which CPUs the progress threads of a replica's fabric ports may run on."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

from pdd.base.errors import OperatorError
from pdd.base.ids import NodeName
from pdd.topology.discover_sysfs import Machine, read_machine
from pdd.topology.model import Replica, Topology
from pdd.topology.nics import port_interfaces

CpuLists = tuple[tuple[int, ...], ...]
"""For each rank the CPUs of its progress threads; empty: they run anywhere."""


def local_progress_cores(topology: Topology, node: NodeName, replica: Replica) -> CpuLists:
    """For a replica of this machine, as its NICs and this process's affinity are now."""
    if (decided := _decided(topology, node, replica)) is not None:
        return decided
    interfaces = port_interfaces(replica, topology.nodes[node].host)
    try:
        machine = read_machine()
    except OperatorError:  # a container without sysfs
        machine = Machine(gpus=(), nics=(), numa_nodes=(), left_out=())
    return progress_cores(
        topology, node, replica, machine=machine, interfaces=interfaces, usable=os.sched_getaffinity(0)
    )


def progress_cores(
    topology: Topology,
    node: NodeName,
    replica: Replica,
    *,
    machine: Machine,
    interfaces: Sequence[Sequence[str]],
    usable: Collection[int],
) -> CpuLists:
    """What `replica.progress_cores` says; for `auto` the usable CPUs of the NUMA nodes of the rank's NICs, without
    those that the executors of this machine are pinned to. Pure.

    interfaces: for each rank the names of its NICs. A NIC that `machine` does not know is near to every node.
    """
    if (decided := _decided(topology, node, replica)) is not None:
        return decided
    free = set(usable).difference(*_pinned(topology, node))
    return tuple(
        tuple(sorted(free & near if near else free)) for near in (_near(machine, names) for names in interfaces)
    )


def _decided(topology: Topology, node: NodeName, replica: Replica) -> CpuLists | None:
    """What no look at the machine changes."""
    anywhere: CpuLists = ((),) * replica.parallel.num_ranks
    if replica.progress_cores_by_rank is not None:
        return replica.progress_cores_by_rank or anywhere
    # Executors that may run everywhere leave no core to others.
    return None if all(_pinned(topology, node)) else anywhere


def _pinned(topology: Topology, node: NodeName) -> list[tuple[int, ...]]:
    """The cores of each replica of the node's machine; empty for one whose executors run anywhere."""
    machine = topology.nodes[node].machine
    neighbours = [it for it in topology.nodes.values() if it.machine == machine]
    return [replica.cores for neighbour in neighbours for replica in neighbour.replicas]


def _near(machine: Machine, names: Sequence[str]) -> set[int]:
    """The CPUs of the NUMA nodes of these NICs; empty where the node of one is not known."""
    nodes = {nic.numa_node for name in names for nic in machine.nics if name in {nic.name, nic.interface}}
    known = [node for node in machine.numa_nodes if node.number in nodes]
    found = {name for nic in machine.nics for name in (nic.name, nic.interface)}
    if len(known) < len(nodes) or not found.issuperset(names):
        return set()
    return {cpu for node in known for core in node.cores for cpu in core}
