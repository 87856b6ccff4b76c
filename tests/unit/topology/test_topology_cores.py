"""Where progress threads may run: what the topology says, or near the NICs and off the executors' cores."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from sysfs_machines import DGX_H100, P5, build

from pdd.base.errors import TopologyInvalid
from pdd.base.ids import NodeName
from pdd.topology.cores import CpuLists, local_progress_cores, progress_cores
from pdd.topology.discover_sysfs import Machine, read_machine
from pdd.topology.load import load
from pdd.topology.model import Cluster, Model, Node, Parallel, Replica, Role, Topology
from pdd.topology.nics import port_interfaces

N0 = NodeName("n0")
LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


@pytest.fixture(scope="module")
def dgx(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return read_machine(build(tmp_path_factory.mktemp("dgx"), DGX_H100))


def topology(*replicas: Replica, others: tuple[Node, ...] = ()) -> Topology:
    nodes = (Node(host="192.0.2.1", control_port=1, replicas=replicas), *others)
    return Topology(
        version=1,
        cluster=Cluster(key_file=Path("/k")),
        model=Model(name="m", path=Path("/m")),
        nodes={NodeName(f"n{index}"): node for index, node in enumerate(nodes)},
    )


def pinned(
    machine: Machine, of: Topology, interfaces: tuple[tuple[str, ...], ...], usable: range = range(224)
) -> CpuLists:
    replica = of.nodes[N0].replicas[0]
    return progress_cores(of, N0, replica, machine=machine, interfaces=interfaces, usable=usable)


NODE_0 = {*range(56), *range(112, 168)}
NODE_1 = {*range(56, 112), *range(168, 224)}


def test_auto_is_the_nics_numa_node_without_the_executors_cores(dgx: Machine) -> None:
    replica = Replica(role=Role.PREFILL, parallel=Parallel(tp=2), cores=(0, 1, 56, 57))
    first, second = pinned(dgx, topology(replica), (("mlx5_0",), ("ibp220s0",)))
    assert set(first) == NODE_0 - {0, 1}
    assert set(second) == NODE_1 - {56, 57}


def test_executors_of_other_replicas_of_the_machine_count(dgx: Machine) -> None:
    replica = Replica(role=Role.PREFILL, cores=(0,))
    neighbour = Replica(role=Role.DECODE, cores=tuple(range(1, 50)))
    same = Node(host="192.0.2.1", control_port=2, replicas=(neighbour,))
    elsewhere = Node(host="192.0.2.2", control_port=2, replicas=(Replica(role=Role.DECODE, cores=(55,)),))
    (found,) = pinned(dgx, topology(replica, others=(same, elsewhere)), (("ibp24s0",),), range(56))
    assert found == (50, 51, 52, 53, 54, 55)


def test_where_none_is_left_threads_run_anywhere(dgx: Machine) -> None:
    all_of_node_0 = Replica(role=Role.PREFILL, cores=tuple(sorted(NODE_0)))
    assert pinned(dgx, topology(all_of_node_0), (("mlx5_0",),)) == ((),)
    anywhere = Replica(role=Role.PREFILL, parallel=Parallel(dp=2))
    assert pinned(dgx, topology(anywhere), (("mlx5_0",), ("mlx5_0",))) == ((), ())
    beside_it = topology(Replica(role=Role.PREFILL, cores=(0,)), anywhere)
    assert pinned(dgx, beside_it, (("mlx5_0",),)) == ((),)


def test_a_nic_of_unknown_place_is_near_to_all(dgx: Machine) -> None:
    """CPUs 54 and 55 are of node 0, 56 and 57 of node 1."""
    replica = Replica(role=Role.PREFILL, cores=(0, 1))
    for names in (("lo",), ("mlx5_0", "lo"), ()):
        assert pinned(dgx, topology(replica), (names,), range(54, 58)) == ((54, 55, 56, 57),)


def test_nics_on_two_nodes_allow_both(dgx: Machine) -> None:
    (found,) = pinned(dgx, topology(Replica(role=Role.PREFILL, cores=(0,))), (("mlx5_0", "mlx5_11"),))
    assert set(found) == (NODE_0 | NODE_1) - {0}


def test_what_is_written_wins(dgx: Machine) -> None:
    replica = Replica(role=Role.PREFILL, parallel=Parallel(tp=2), cores=(0,), progress_cores=(7, (8, 9)))
    assert pinned(dgx, topology(replica), (("mlx5_0",), ("mlx5_0",))) == ((7,), (8, 9))
    nothing = Replica(role=Role.PREFILL, parallel=Parallel(tp=2), cores=(0,), progress_cores=())
    assert pinned(dgx, topology(nothing), (("mlx5_0",), ("mlx5_0",))) == ((), ())


def test_only_usable_cpus(tmp_path: Path) -> None:
    machine = read_machine(build(tmp_path / "sys", P5))
    replica = Replica(role=Role.PREFILL, cores=(0,))
    assert pinned(machine, topology(replica), (("rdmap201s0",),), range(40, 52)) == ((48, 49, 50, 51),)


def test_addresses_become_the_interfaces_that_have_them() -> None:
    auto = Replica(role=Role.PREFILL, parallel=Parallel(tp=2))
    assert port_interfaces(auto, "127.0.0.1") == ((LOOPBACK,), (LOOPBACK,))
    named = Replica(role=Role.PREFILL, nics=(("127.0.0.1", "rdmap79s0", "192.0.2.77"),))
    assert port_interfaces(named, "192.0.2.1") == ((LOOPBACK, "rdmap79s0", "192.0.2.77"),)


def test_on_this_machine() -> None:
    usable = sorted(os.sched_getaffinity(0))
    replica = Replica(role=Role.PREFILL, cores=(usable[0],))
    assert local_progress_cores(topology(replica), N0, replica) == (tuple(usable[1:]),)


@pytest.mark.parametrize(
    ("written", "fault"),
    [
        ("all", "progress_cores: 'all' is none of: auto"),
        ("3", "progress_cores: '3' is none of: auto"),
        ("[-1]", "progress_cores[0]: -1 is too small: at least 0"),
        ("[[a]]", "progress_cores[0][0]: 'a' is not a whole number"),
        ("[{a: 1}]", "progress_cores[0]: needs one value, not a mapping"),
    ],
)
def test_what_is_no_progress_core(tmp_path: Path, written: str, fault: str) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        f"""\
version: 1
cluster: {{key_file: key}}
model: {{name: toy, path: model}}
nodes:
  n0: {{control_port: 7000, http: {{port: 8000}}, replicas: [{{role: colocated, progress_cores: {written}}}]}}
"""
    )
    with pytest.raises(TopologyInvalid) as caught:
        load(path)
    assert f"nodes.n0.replicas[0].{fault}" in str(caught.value)
    assert "\n" not in str(caught.value)
