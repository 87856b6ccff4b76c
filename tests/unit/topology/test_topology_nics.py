"""NICs of a topology: how they are written, what breaks the rules, and which addresses the names mean here."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pdd.base.errors import TopologyInvalid
from pdd.base.ids import NodeName
from pdd.topology.check import check_local, warnings
from pdd.topology.load import load
from pdd.topology.model import Parallel, Provider, Replica, Role, Topology
from pdd.topology.nics import nic_address, port_hosts

LOOPBACK = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))

Load = Callable[..., Topology]


@pytest.fixture
def load_nics(tmp_path: Path) -> Load:
    def load_text(nics: str, parallel: str = "{}", provider: str = "tcp", role: str = "prefill") -> Topology:
        path = tmp_path / "t.yaml"
        path.write_text(
            f"""\
version: 1
cluster: {{key_file: key, run_dir: /tmp}}
model: {{name: toy, path: model}}
fabric: {{provider: {provider}}}
nodes:
  n0:
    control_port: 7000
    http: {{port: 8000}}
    replicas:
      - {{role: decode}}
      - {{role: prefill}}
      - {{role: {role}, parallel: {parallel}, nics: {nics}}}
"""
        )
        return load(path)

    return load_text


def last(topology: Topology) -> Replica:
    return topology.nodes[NodeName("n0")].replicas[-1]


@pytest.mark.parametrize(
    ("written", "parallel", "by_rank"),
    [
        ("auto", "{tp: 4}", ()),
        ("[eth0]", "{}", (("eth0",),)),
        ("[eth0, eth1]", "{tp: 2}", (("eth0",), ("eth1",))),
        ("[[eth0, eth1], [eth2, eth3]]", "{dp: 2}", (("eth0", "eth1"), ("eth2", "eth3"))),
        ("[[eth0], 192.0.2.7]", "{tp: 2}", (("eth0",), ("192.0.2.7",))),
    ],
)
def test_each_rank_has_one_nic_or_several(
    load_nics: Load, written: str, parallel: str, by_rank: tuple[tuple[str, ...], ...]
) -> None:
    replica = last(load_nics(written, parallel))
    assert replica.nics_by_rank == by_rank


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (
            {"nics": "[eth0]", "parallel": "{tp: 2, dp: 2}"},
            "nics: 1 entry for 4 ranks (tp 2, dp 2): write one for each",
        ),
        ({"nics": "[eth0, eth1]"}, "nics: 2 entries for 1 rank (tp 1, dp 1)"),
        ({"nics": "[]"}, "nics: 0 entries for 1 rank"),
        (
            {"nics": "[[a, b], [c]]", "parallel": "{tp: 2}"},
            "nics[1]: rank 1 has 1 NIC, rank 0 has 2: every rank has as many",
        ),
        ({"nics": "[[]]"}, "nics[0]: rank 0 has no NIC"),
        ({"nics": "[[a, b, a]]"}, "nics[0]: rank 0 names a twice"),
        ({"nics": "[[a, b]]", "provider": "shm"}, "nics: provider shm uses no NIC"),
        ({"nics": "all"}, "nics: 'all' is none of: auto"),
        ({"nics": ""}, "nics: empty: auto"),
        ({"nics": "{eth0: 1}"}, "nics: needs one value, not a mapping"),
        ({"nics": "[[[a]]]"}, "nics[0][0]: needs one value, not a list"),
        ({"nics": "[1]"}, "nics[0]: YAML reads '1' as a number"),
    ],
)
def test_what_is_no_map_of_nics(load_nics: Load, options: dict[str, Any], fault: str) -> None:
    with pytest.raises(TopologyInvalid) as caught:
        load_nics(**options)
    (line,) = str(caught.value).split("\n")
    assert f"nodes.n0.replicas[2].{fault}" in line


def test_shm_without_a_map_is_fine(load_nics: Load) -> None:
    assert last(load_nics("auto", provider="shm")).nics_by_rank == ()


def test_nics_of_a_colocated_replica_are_a_warning(load_nics: Load) -> None:
    assert "its nics are not used" in warnings(load_nics("[eth0]", role="colocated"))[0]
    assert warnings(load_nics("[eth0]")) == []


def test_every_absent_nic_is_told_before_the_start(load_nics: Load) -> None:
    check_local(load_nics(f"[[{LOOPBACK}, 127.0.0.2]]"), NodeName("n0"))
    with pytest.raises(TopologyInvalid) as caught:
        check_local(load_nics(f"[[nic-a, {LOOPBACK}], [nic-b, 192.0.2.77]]", "{tp: 2}"), NodeName("n0"))
    lines = str(caught.value).split("\n")
    assert len(lines) == 3
    for line, nic in zip(lines, ("192.0.2.77", "nic-a", "nic-b"), strict=True):
        assert line.startswith("nodes.n0.replicas[2].nics: ")
        assert nic in line
        assert f"{LOOPBACK} (127.0.0.1)" in line, "which there are"


def test_a_name_and_its_address_are_one_nic(load_nics: Load) -> None:
    with pytest.raises(TopologyInvalid) as caught:
        check_local(load_nics(f"[[127.0.0.2, {LOOPBACK}], [{LOOPBACK}, 127.0.0.1]]", "{tp: 2}"), NodeName("n0"))
    assert str(caught.value) == (
        f"nodes.n0.replicas[2].nics: rank 1 names one NIC twice: {LOOPBACK} and 127.0.0.1 are both 127.0.0.1"
    )


def test_names_mean_addresses() -> None:
    assert nic_address(LOOPBACK) == "127.0.0.1"
    assert nic_address("127.0.0.9") == "127.0.0.9"
    for absent in (LOOPBACK + "x" * 300, "192.0.2.77", "127.0.0.1.1", "é"):
        with pytest.raises(TopologyInvalid, match=r"there are .*\(127.0.0.1\)"):
            nic_address(absent)


def test_ports_bind_the_node_s_host_or_the_nics() -> None:
    auto = Replica(role=Role.PREFILL, parallel=Parallel(tp=2))
    assert port_hosts(auto, "192.0.2.1", Provider.TCP) == (("192.0.2.1",), ("192.0.2.1",))
    named = Replica(role=Role.PREFILL, nics=((LOOPBACK, "127.0.0.2"),))
    assert port_hosts(named, "192.0.2.1", Provider.TCP) == (("127.0.0.1", "127.0.0.2"),)
    efa = Replica(role=Role.PREFILL, nics=(("rdmap79s0", "rdmap80s0"),))
    assert port_hosts(efa, "192.0.2.1", Provider.EFA) == (("rdmap79s0", "rdmap80s0"),)
