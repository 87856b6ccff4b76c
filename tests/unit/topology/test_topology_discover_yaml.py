"""What discovery prints is a topology file: it loads for every machine, and says what was found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sysfs_machines
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sysfs_machines import BARE, DGX_H100, LAPTOP, P5, Function, Tree, build

from pdd.base.ids import NodeName
from pdd.topology.check import warnings
from pdd.topology.discover import propose
from pdd.topology.discover_sysfs import Device, Machine, Nic, NicKind, NumaNode, read_machine
from pdd.topology.discover_yaml import topology_text
from pdd.topology.load import load
from pdd.topology.model import Provider, Replica, Role, Topology

TREES = {name: tree for name, tree in vars(sysfs_machines).items() if isinstance(tree, Tree)}


def proposed(tmp_path: Path, tree: Tree, role: Role = Role.PREFILL, providers: tuple[str, ...] = ("tcp", "shm")) -> str:
    machine = read_machine(build(tmp_path / "sys", tree))
    return topology_text(machine, propose(machine), role, providers)


def loaded(tmp_path: Path, text: str) -> Topology:
    path = tmp_path / "t.yaml"
    path.write_text(text)
    return load(path)


def replica(topology: Topology, node: str) -> Replica:
    return topology.nodes[NodeName(node)].replicas[0]


def test_all_machines_are_tried() -> None:
    assert len(TREES) == 11


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("name", TREES)
def test_it_loads_for_every_machine_and_role(tmp_path: Path, name: str, role: Role) -> None:
    topology = loaded(tmp_path, proposed(tmp_path, TREES[name], role, tuple(Provider)))
    assert warnings(topology) == []
    num_gpus = sum(function.kind == "0x030200" for function in TREES[name].functions)
    for node in topology.nodes.values():
        (one,) = node.replicas
        assert one.parallel.num_ranks == (num_gpus or 1)
        assert len(one.cores) % one.parallel.num_ranks == 0


def test_a_role_gets_the_other_one_on_another_machine(tmp_path: Path) -> None:
    for role, here in ((Role.PREFILL, "prefill0"), (Role.DECODE, "decode0")):
        topology = loaded(tmp_path, proposed(tmp_path / role, LAPTOP, role))
        assert {name: node.host == "192.0.2.10" for name, node in topology.nodes.items()} == {
            "prefill0": here == "prefill0",
            "decode0": here == "decode0",
        }
        assert replica(topology, "decode0").role is Role.DECODE
    topology = loaded(tmp_path, proposed(tmp_path / "colocated", LAPTOP, Role.COLOCATED))
    assert list(topology.nodes) == ["colocated0"]


def test_ranks_of_a_dgx_use_their_interfaces(tmp_path: Path) -> None:
    topology = loaded(tmp_path, proposed(tmp_path, DGX_H100))
    one = replica(topology, "prefill0")
    buses = (0x18, 0x40, 0x4F, 0x5E, 0x9A, 0xC0, 0xCE, 0xDC)
    assert one.nics_by_rank == tuple((f"ibp{bus}s0",) for bus in buses)
    assert one.progress_cores_by_rank is not None
    assert one.progress_cores_by_rank[0] == (55, 167)
    assert one.cores[: len(one.cores) // 8] == (*range(13), *range(112, 125))
    assert one.threads == 13
    assert topology.fabric.provider is Provider.TCP
    assert topology.model.dtype == "bfloat16"


def test_every_nic_found_is_told_with_its_use(tmp_path: Path) -> None:
    text = proposed(tmp_path, DGX_H100)
    assert "# used: mlx5_0 (ibp24s0): verbs, 0000:18:00.0, NUMA node 0, 400 Gbit/s\n" in text
    assert "# not used: mlx5_1 (ibp41s0f0): verbs" in text
    assert "# not used: eno3: ethernet" in text
    assert "# not used: enp0s31f6: not an Ethernet interface that is up" in proposed(tmp_path / "laptop", LAPTOP)


def test_nics_without_a_provider_are_a_comment(tmp_path: Path) -> None:
    text = proposed(tmp_path, P5)
    assert replica(loaded(tmp_path, text), "prefill0").nics == "auto"
    assert "# This pdd has no provider for these NICs (efa)" in text
    assert "#   - [rdmap79s0, rdmap80s0, rdmap81s0, rdmap82s0]  # rank 0" in text


def test_nics_are_used_by_their_own_provider_where_there_is_one(tmp_path: Path) -> None:
    tree = yaml.safe_load(proposed(tmp_path / "p5", P5, providers=("tcp", "efa")))
    assert tree["fabric"] == {"provider": "efa"}
    assert nics(tree)[0] == ["rdmap79s0", "rdmap80s0", "rdmap81s0", "rdmap82s0"]
    tree = yaml.safe_load(proposed(tmp_path / "dgx", DGX_H100, providers=("tcp", "verbs")))
    assert tree["fabric"] == {"provider": "verbs"}
    assert nics(tree)[0] == ["ibp24s0"], "verbs binds the address of an interface"


def nics(tree: dict[str, Any]) -> list[list[str]]:
    found: list[list[str]] = tree["nodes"]["prefill0"]["replicas"][0]["nics"]
    return found


def test_without_a_network_or_cores_to_divide_nothing_is_said_of_them(tmp_path: Path) -> None:
    one = replica(loaded(tmp_path, proposed(tmp_path, BARE)), "prefill0")
    assert (one.nics, one.progress_cores, one.cores) == ("auto", "auto", (0,))
    one = replica(loaded(tmp_path, proposed(tmp_path / "p5", P5._replace(nodes={0: "0", 1: "1"}))), "prefill0")
    assert (one.cores, one.progress_cores, one.threads) == ((), "auto", None)


@pytest.mark.parametrize("name", ["on", "1", "0x10", "a,b", "[x]", "#", "é", "e: f", "null", "1e3"])
def test_names_that_yaml_would_misread_are_quoted(tmp_path: Path, name: str) -> None:
    functions = [Function("pci0000:00/0000:00:03.0", "0x8086", "0x020000", interface=name)]
    topology = loaded(tmp_path, proposed(tmp_path, LAPTOP._replace(functions=functions)))
    assert replica(topology, "decode0").nics_by_rank == ((name,),)


def test_a_name_cannot_end_a_comment(tmp_path: Path) -> None:
    functions = [Function("pci0000:00/0000:00:03.0", "0x8086", "0x020000", interface="a\x85b", operstate="down")]
    assert "# not used: a?b: not" in proposed(tmp_path, LAPTOP._replace(functions=functions))


numbers = st.none() | st.integers(0, 3)
paths = st.lists(st.sampled_from(["a", "b", "c"]), max_size=3).map(tuple)
devices = st.builds(Device, path=paths, numa_node=numbers)
nics_found = st.builds(
    Nic,
    path=paths,
    numa_node=numbers,
    name=st.sampled_from(["n0", "n1", "n2", "n3"]),
    kind=st.sampled_from(NicKind),
    interface=st.none() | st.sampled_from(["eth0", "eth1", "eth2"]),
    gigabits_per_s=st.none() | st.sampled_from([10.0, 100.0, 400.0]),
)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    """Any number of anything, in any place."""
    found = draw(st.lists(nics_found, max_size=6, unique_by=lambda nic: nic.name))
    sizes = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    first = 0
    nodes = []
    for number, size in enumerate(sizes):
        nodes.append(NumaNode(number, tuple((cpu, cpu + 100) for cpu in range(first, first + size))))
        first += size
    gpus = draw(st.lists(devices, max_size=6))
    return Machine(gpus=tuple(gpus), nics=tuple(found), numa_nodes=tuple(nodes), left_out=())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(machine=machines(), role=st.sampled_from(Role))
def test_whatever_a_machine_has_the_proposal_loads(tmp_path: Path, machine: Machine, role: Role) -> None:
    ranks = propose(machine)
    assert len({(len(rank.nics), len(rank.cores), bool(rank.progress_core)) for rank in ranks}) == 1, "all alike"
    taken = [cpu for rank in ranks for core in (*rank.cores, rank.progress_core) for cpu in core]
    assert len(taken) == len(set(taken))
    topology = loaded(tmp_path, topology_text(machine, ranks, role))
    assert warnings(topology) == []
