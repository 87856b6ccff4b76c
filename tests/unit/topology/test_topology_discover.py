"""Discovery on small sysfs trees of known machines: the whole map of each."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import msgspec
import pytest
from sysfs_machines import (
    AZURE_ND_H100,
    AZURE_WITHOUT_NUMA,
    BARE,
    DGX_H100,
    G6,
    HGX_H200,
    LAPTOP,
    P4D,
    P5,
    P5EN,
    P6_B200,
    Function,
    Tree,
    build,
)

from pdd.base.errors import OperatorError
from pdd.topology.discover import Rank, propose, usable_nics
from pdd.topology.discover_sysfs import Machine, Nic, NicKind, NumaNode, cpu_list, numa_nodes, read_machine, restricted


def discovered(tmp_path: Path, tree: Tree) -> tuple[Machine, tuple[Rank, ...]]:
    machine = read_machine(build(tmp_path / "sys", tree))
    return machine, propose(machine)


def efa(*buses: int) -> list[str]:
    return [f"rdmap{bus}s0" for bus in buses]


MAPS: dict[str, tuple[Tree, dict[str, list[str]]]] = {
    "p5": (
        P5,
        {f"0000:{gpu:02x}:00.0": efa(*range(gpu - 4, gpu)) for gpu in (0x53, 0x64, 0x75, 0x86, 0x97, 0xA8, 0xB9, 0xCA)},
    ),
    "p5en": (
        P5EN,
        {
            "0000:59:00.0": efa(0x55, 0x56), "0000:5a:00.0": efa(0x57, 0x58),
            "0000:72:00.0": efa(0x6E, 0x6F), "0000:73:00.0": efa(0x70, 0x71),
            "0000:8b:00.0": efa(0x87, 0x88), "0000:8c:00.0": efa(0x89, 0x8A),
            "0000:a4:00.0": efa(0xA0, 0xA1), "0000:a5:00.0": efa(0xA2, 0xA3),
        },
    ),
    "p6-b200": (
        P6_B200,
        {
            "0000:51:00.0": efa(0x4F), "0000:52:00.0": efa(0x50), "0000:62:00.0": efa(0x60), "0000:63:00.0": efa(0x61),
            "0000:75:00.0": efa(0x71), "0000:76:00.0": efa(0x72), "0000:86:00.0": efa(0x84), "0000:87:00.0": efa(0x85),
        },
    ),
    "p4d": (
        P4D,
        {
            f"0000:{bus:02x}:{device}.0": [f"rdmap{bus}s27"]
            for bus in (0x10, 0x20, 0x90, 0xA0)
            for device in ("1c", "1d")
        },
    ),
    "g6": (G6, {f"0000:00:{device:02x}.0": ["rdmap0s27"] for device in range(0x10, 0x18)}),
    "dgx-h100": (
        DGX_H100,
        {
            "0000:1b:00.0": ["mlx5_0"], "0000:43:00.0": ["mlx5_3"], "0000:52:00.0": ["mlx5_4"],
            "0000:61:00.0": ["mlx5_5"], "0000:9d:00.0": ["mlx5_6"], "0000:c3:00.0": ["mlx5_9"],
            "0000:d1:00.0": ["mlx5_10"], "0000:df:00.0": ["mlx5_11"],
        },
    ),
    "hgx-h200": (
        HGX_H200,
        {
            f"0000:{bus:02x}:00.0": [f"mlx5_{number}"]
            for number, bus in enumerate((0x18, 0x2A, 0x3A, 0x5D, 0x9A, 0xAB, 0xBA, 0xDD))
        },
    ),
    "azure": (
        AZURE_ND_H100,
        {f"{domain:04x}:00:00.0": [f"mlx5_ib{i}"] for i, domain in enumerate((1, 2, 3, 8, 9, 10, 11, 12))},
    ),
    "azure-without-numa": (
        AZURE_WITHOUT_NUMA,
        {f"{domain:04x}:00:00.0": [f"mlx5_ib{i}"] for i, domain in enumerate((1, 2, 3, 8, 9, 10, 11, 12))},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MAPS)
def test_each_gpu_gets_the_nics_next_to_it(tmp_path: Path, name: str) -> None:
    tree, expected = MAPS[name]
    _, ranks = discovered(tmp_path, tree)
    assert {rank.device.address: [nic.name for nic in rank.nics] for rank in ranks if rank.device} == expected
    assert len(ranks) == 8


@pytest.mark.parametrize("name", MAPS)
def test_each_rank_gets_cores_of_its_own_on_its_numa_node(tmp_path: Path, name: str) -> None:
    machine, ranks = discovered(tmp_path, MAPS[name][0])
    of_node = {node.number: set(node.cores) for node in machine.numa_nodes}
    everywhere = set().union(*of_node.values())
    for rank in ranks:
        assert rank.device is not None
        node = rank.device.numa_node
        assert set(rank.cores) <= (everywhere if node is None else of_node[node])
        assert rank.progress_core in (everywhere if rank.nics[0].numa_node is None else of_node[rank.nics[0].numa_node])
    assert len({len(rank.cores) for rank in ranks}) == 1, "an even split gives each its own"
    taken = [cpu for rank in ranks for core in (*rank.cores, rank.progress_core) for cpu in core]
    assert len(taken) == len(set(taken)), "none twice"


def test_cores_of_a_p5(tmp_path: Path) -> None:
    machine, ranks = discovered(tmp_path, P5)
    assert [node.cores[0] for node in machine.numa_nodes] == [(0, 96), (48, 144)]
    assert ranks[0].cores == tuple((cpu, cpu + 96) for cpu in range(11))
    assert [rank.progress_core for rank in ranks[:4]] == [(47, 143), (46, 142), (45, 141), (44, 140)]
    assert ranks[4].cores[0] == (48, 144)


def test_four_numa_nodes_with_unlike_numbers_of_gpus(tmp_path: Path) -> None:
    machine, ranks = discovered(tmp_path, HGX_H200)
    assert [node.number for node in machine.numa_nodes] == [0, 1, 2, 3]
    assert [len(rank.cores) for rank in ranks] == [7] * 8, "as many as on the node with three GPUs"
    assert ranks[3].progress_core == (47, 143)


def test_what_is_read_of_a_nic(tmp_path: Path) -> None:
    machine, _ = discovered(tmp_path, P5)
    nic = next(nic for nic in machine.nics if nic.name == "rdmap79s0")
    assert (nic.kind, nic.address, nic.numa_node, nic.interface) == (NicKind.EFA, "0000:4f:00.0", 0, None)
    assert nic.path == ("pci0000:44", "0000:44:00.0", "0000:45:00.0", "0000:46:01.0", "0000:4f:00.0")
    assert nic.gigabits_per_s == 100
    assert len(machine.nics) == 33
    machine, _ = discovered(tmp_path / "dgx", DGX_H100)
    nic = next(nic for nic in machine.nics if nic.name == "mlx5_3")
    assert (nic.kind, nic.interface, nic.gigabits_per_s) == (NicKind.VERBS, "ibp64s0", 400)
    nic = next(nic for nic in machine.nics if nic.name == "eno3")
    assert (nic.kind, nic.gigabits_per_s) == (NicKind.ETHERNET, 1)


def test_a_narrow_link_limits_a_fast_port(tmp_path: Path) -> None:
    machine, _ = discovered(tmp_path, P6_B200)
    narrow = next(nic for nic in machine.nics if nic.name == "ibp115s0f0")
    assert narrow.gigabits_per_s == pytest.approx(31.5, abs=0.1)


def test_where_the_tree_is_hidden_the_numa_node_decides(tmp_path: Path) -> None:
    other_way_round = [
        function._replace(numa_node=1 - function.numa_node) if function.rdma else function
        for function in AZURE_ND_H100.functions
    ]
    _, ranks = discovered(tmp_path, AZURE_ND_H100._replace(functions=other_way_round))
    assert [nic.name for rank in ranks for nic in rank.nics] == [f"mlx5_ib{i}" for i in (4, 5, 6, 7, 0, 1, 2, 3)]


def test_nics_for_other_purposes_are_not_usable(tmp_path: Path) -> None:
    machine, _ = discovered(tmp_path / "p6", P6_B200)
    assert {nic.name for nic in usable_nics(machine)} == set(efa(0x4F, 0x50, 0x60, 0x61, 0x71, 0x72, 0x84, 0x85))
    machine, _ = discovered(tmp_path / "azure", AZURE_ND_H100)
    assert {nic.name for nic in usable_nics(machine)} == {f"mlx5_ib{i}" for i in range(8)}, "the slow one is left out"
    machine, _ = discovered(tmp_path / "p5", P5)
    assert "enp71s0" not in {nic.name for nic in usable_nics(machine)}, "RDMA before Ethernet"


def test_of_two_kinds_that_are_equally_fast_the_more_numerous_is_usable() -> None:
    nics = [
        Nic(name=f"{kind}{i}", kind=kind, interface=None, gigabits_per_s=rate)
        for kind, number, rate in ((NicKind.VERBS, 2, 400.0), (NicKind.EFA, 3, None), (NicKind.EFA, 9, 100.0))
        for i in range(number)
    ]
    machine = Machine(gpus=(), nics=tuple(nics), numa_nodes=(), left_out=())
    assert [nic.name for nic in usable_nics(machine)] == ["efa0", "efa1", "efa2"]


def test_a_virtual_gpu_is_not_counted(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", P4D)
    (root / "bus/pci/devices/0000:10:1d.0/physfn").symlink_to(root / "bus/pci/devices/0000:10:1c.0")
    assert len(read_machine(root).gpus) == 7


def test_cpus_that_a_container_may_not_use_are_not_proposed(tmp_path: Path) -> None:
    machine = restricted(read_machine(build(tmp_path / "sys", LAPTOP)), {0, 1, 4})
    assert machine.numa_nodes == (NumaNode(0, ((0, 4), (1,))),)
    machine = restricted(read_machine(build(tmp_path / "p5", P5)), range(48))
    assert [node.number for node in machine.numa_nodes] == [0]
    taken = {cpu for rank in propose(machine) for core in (*rank.cores, rank.progress_core) for cpu in core}
    assert taken <= set(range(48))
    assert taken


def test_a_nic_that_is_down_is_left_out_and_named(tmp_path: Path) -> None:
    machine, _ = discovered(tmp_path, HGX_H200)
    assert machine.left_out == ("mlx5_9: no port of it is active",)
    lost = [f._replace(state="1: DOWN") if f.rdma == "mlx5_2" else f for f in HGX_H200.functions]
    _, ranks = discovered(tmp_path / "lost", HGX_H200._replace(functions=lost))
    assert [nic.name for nic in ranks[2].nics] in (["mlx5_0"], ["mlx5_1"], ["mlx5_8"]), "another one of its NUMA node"


def test_a_machine_without_gpus_has_one_rank(tmp_path: Path) -> None:
    machine, (rank,) = discovered(tmp_path, LAPTOP)
    assert machine.gpus == (), "graphics of a CPU do not compute"
    assert rank.device is None
    assert [nic.name for nic in rank.nics] == ["wlp0s20f3"]
    assert machine.left_out == ("enp0s31f6: not an Ethernet interface that is up",)
    assert (rank.cores, rank.progress_core) == (((0, 4), (1, 5), (2, 6)), (3, 7))


def test_a_machine_with_next_to_nothing(tmp_path: Path) -> None:
    machine, (rank,) = discovered(tmp_path, BARE)
    assert machine == Machine(gpus=(), nics=(), numa_nodes=numa_nodes(tmp_path / "none"), left_out=())
    assert (rank.nics, rank.cores, rank.progress_core) == ((), ((0,),), ())


def test_a_cpu_rank_takes_the_fastest_interface(tmp_path: Path) -> None:
    names = {"eno1": "1000", "ens2": "100000", "ens3": "25000"}
    functions = [
        Function(f"pci0000:0{i}/0000:0{i}:00.0", "0x8086", "0x020000", 0, interface=name, speed=speed)
        for i, (name, speed) in enumerate(names.items())
    ]
    _, (rank,) = discovered(tmp_path, LAPTOP._replace(functions=functions))
    assert [nic.name for nic in rank.nics] == ["ens2"]


def test_interfaces_of_a_bond_are_one_nic_with_the_bond_s_name(tmp_path: Path) -> None:
    functions = [
        Function(f"pci0000:0{i}/0000:0{i}:00.0", "0x8086", "0x020000", 0, interface=f"ens{i}", speed="25000")
        for i in range(2)
    ]
    root = build(tmp_path / "sys", LAPTOP._replace(functions=functions, virtual=("lo", "bond0")))
    for i in range(2):
        (root / f"class/net/ens{i}/master").symlink_to(root / "devices/virtual/net/bond0")
    (rank,) = propose(read_machine(root))
    assert [nic.interface for nic in rank.nics] == ["bond0"]


def test_a_virtual_function_beside_its_nic_is_left_out(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", DGX_H100)
    nic = (root / "class/infiniband/mlx5_0").resolve().parents[1]
    (nic / "physfn").symlink_to((root / "class/infiniband/mlx5_3").resolve().parents[1])
    machine = read_machine(root)
    assert "mlx5_0" not in {nic.name for nic in machine.nics}
    assert machine.left_out == ("mlx5_0: a virtual function of a NIC that is here itself",)


def test_a_nic_behind_virtio_is_where_its_pci_function_is(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", BARE)
    device = root / "devices/pci0000:00/0000:00:03.0/virtio2"
    (device / "net/eth0").mkdir(parents=True)
    (device / "net/eth0/operstate").write_text("up\n")
    (device / "net/eth0/type").write_text("1\n")
    (device / "net/eth0/device").symlink_to(device)
    (device.parent / "numa_node").write_text("3\n")
    (root / "class/net/eth0").symlink_to(device / "net/eth0")
    (nic,) = read_machine(root).nics
    assert (nic.path, nic.numa_node) == (("pci0000:00", "0000:00:03.0"), 3)


def test_mixed_gpus_divide_evenly_and_equally(tmp_path: Path) -> None:
    """Three GPUs and four NICs behind one switch: one each, and no rank has more than another."""
    functions = [function for function in P5EN.functions if "pci0000:44" in function.path]
    third = functions[-1]._replace(path=functions[-1].path.replace("5a:00.0", "5b:00.0"))
    _, ranks = discovered(tmp_path, P5EN._replace(functions=[*functions, third]))
    assert [[nic.name for nic in rank.nics] for rank in ranks] == [efa(0x55), efa(0x56), efa(0x57)]


def test_devices_of_which_some_have_no_numa_node_share_all_cores(tmp_path: Path) -> None:
    functions = [f._replace(numa_node=-1) if "59:00.0" in f.path else f for f in P5EN.functions]
    _, ranks = discovered(tmp_path, P5EN._replace(functions=functions))
    taken = list(chain.from_iterable(rank.cores for rank in ranks))
    assert len(taken) == len(set(taken))


def test_too_few_cores_are_not_divided(tmp_path: Path) -> None:
    _, ranks = discovered(tmp_path, P5._replace(nodes={0: "0-2", 1: "3-5"}, sibling_distance=0))
    assert {(rank.cores, rank.progress_core) for rank in ranks} == {((), ())}
    _, ranks = discovered(tmp_path / "more", P5._replace(nodes={0: "0-4", 1: "5-9"}, sibling_distance=0))
    assert [rank.cores for rank in ranks] == [((cpu,),) for cpu in (0, 1, 2, 3, 5, 6, 7, 8)]
    assert {rank.progress_core for rank in ranks} == {()}, "executors come first"


def test_files_of_nonsense_are_not_known(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", P5)
    nic = (root / "class/infiniband/rdmap79s0").resolve()
    for path, raw in (
        (nic / "ports/1/rate", b"fast\n"),
        (nic.parents[1] / "numa_node", b"\xff\xfe"),
        (nic.parents[1] / "current_link_width", b"255"),
        (root / "devices/system/node/node1/cpulist", b"1-"),
        (root / "devices/system/cpu/cpu0/topology/thread_siblings_list", b"7"),
    ):
        path.write_bytes(raw)
    machine = read_machine(root)
    found = next(nic for nic in machine.nics if nic.name == "rdmap79s0")
    assert (found.gigabits_per_s, found.numa_node) == (None, None)
    assert [node.number for node in machine.numa_nodes] == [0]
    assert machine.numa_nodes[0].cores[0] == (0,)
    assert len(propose(machine)) == 8


def test_links_that_lead_round_in_a_circle_are_not_known(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", LAPTOP)
    loop = root / "loop"
    loop.symlink_to(loop)
    (root / "bus/pci/devices/0000:99:00.0").symlink_to(loop)
    (root / "class/net/loop0").symlink_to(loop)
    (root / "class/infiniband").mkdir(exist_ok=True)
    (root / "class/infiniband/mlx5_0").symlink_to(loop)
    (root / "class/net/eth7").mkdir()
    (root / "class/net/eth7/device").symlink_to(loop)
    (root / "devices/system/node/node1x").mkdir()
    assert [nic.name for nic in read_machine(root).nics] == ["wlp0s20f3"]


@pytest.mark.parametrize(
    ("cpu", "siblings"), [(0, "0-1"), (1, "0-1,4-5"), (7, "0-7")], ids=["overlap", "chain", "everything"]
)
def test_no_cpu_is_in_two_cores_whatever_the_siblings_lists_say(tmp_path: Path, cpu: int, siblings: str) -> None:
    root = build(tmp_path / "sys", LAPTOP)
    (root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").write_text(f"{siblings}\n")
    found = [each for node in numa_nodes(root) for core in node.cores for each in core]
    assert sorted(found) == list(range(8))


def test_no_cpu_is_in_two_nodes(tmp_path: Path) -> None:
    root = build(tmp_path / "sys", P5)
    (root / "devices/system/node/node1/cpulist").write_text("0-191\n")
    found = [each for node in numa_nodes(root) for core in node.cores for each in core]
    assert sorted(found) == list(range(192))


def test_lists_of_cpus() -> None:
    assert cpu_list("0-2,8,5-6") == [0, 1, 2, 5, 6, 8]
    assert len(cpu_list("0-8191")) == 8192
    for text in ("", "a", "1-", "-1", "1,,2", "9" * 30, "0-8192", "0-999999"):
        assert cpu_list(text) == []


def test_what_is_no_sysfs_is_told(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match="no sysfs"):
        read_machine(tmp_path / "nothing")


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.numa_nodes
    assert msgspec.to_builtins(propose(machine))


def test_rdma_nics_of_a_bond_are_one_as_well() -> None:
    """Both have the bond's interface, and with it its one address."""
    nics = [
        Nic(path=("a",), numa_node=None, name=name, kind=NicKind.VERBS, interface=interface, gigabits_per_s=100.0)
        for name, interface in (("mlx5_0", "bond0"), ("mlx5_1", "bond0"), ("mlx5_2", None), ("mlx5_3", None))
    ]
    machine = Machine(gpus=(), nics=tuple(nics), numa_nodes=(), left_out=())
    assert [nic.name for nic in usable_nics(machine)] == ["mlx5_0", "mlx5_2", "mlx5_3"]
