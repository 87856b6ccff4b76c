"""The rules between fields: each is broken once here, and the examples break none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from pdd.base.errors import OperatorError, TopologyInvalid
from pdd.base.ids import NodeName
from pdd.topology.check import check_local, problems, warnings
from pdd.topology.faults import dotted
from pdd.topology.load import load
from pdd.topology.model import Cluster, Fabric, Http, Model, Node, Parallel, Provider, Replica, Role, Topology
from pdd.topology.run_dir import make_run_dir, run_dir, run_roots

PREFILL = Replica(role=Role.PREFILL)
DECODE = Replica(role=Role.DECODE)
COLOCATED = Replica(role=Role.COLOCATED)


def topology(
    *replicas: Replica,
    nodes: Mapping[str, Node] | None = None,
    cluster: Cluster | None = None,
    fabric: Fabric | None = None,
    version: int = 1,
) -> Topology:
    one = {"n0": Node(control_port=7000, http=Http(port=8000), replicas=replicas or (COLOCATED,))}
    return Topology(
        version=version,
        cluster=cluster or Cluster(key_file=Path("/k")),
        model=Model(name="m", path=Path("/m")),
        fabric=fabric or Fabric(),
        nodes={NodeName(name): node for name, node in (one if nodes is None else nodes).items()},
    )


def told(of: Topology) -> list[str]:
    return [f"{dotted(problem.at)}: {problem.text}" for problem in problems(of)]


def test_usable_topologies_have_no_problem() -> None:
    assert told(topology()) == []
    assert told(topology(PREFILL, DECODE)) == []
    assert told(topology(PREFILL, DECODE, COLOCATED)) == []


def test_page_sizes_may_differ_between_roles() -> None:
    assert told(topology(PREFILL, Replica(role=Role.DECODE, page_tokens=32))) == []


@pytest.mark.parametrize("page_tokens", [1, 2, 16, 64, 256])
def test_page_sizes_that_are_fine(page_tokens: int) -> None:
    both = [Replica(role=role, page_tokens=page_tokens) for role in (Role.PREFILL, Role.DECODE)]
    assert told(topology(*both)) == []


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (topology(version=2), ["version: 2: this pdd reads version 1"]),
        (topology(nodes={}), ["nodes: no node"]),
        (topology(DECODE), ["nodes.n0.replicas[0].role: decode, but no replica prefills for it"]),
        (topology(PREFILL), ["nodes.n0.replicas[0].role: prefill, but no replica decodes"]),
        (topology(COLOCATED, DECODE), ["nodes.n0.replicas[1].role: decode, but no replica prefills"]),
        (topology(nodes={"a": Node(control_port=1, http=Http(port=2))}), ["nodes: no node has a replica"]),
        (topology(nodes={"a": Node(control_port=1, replicas=(COLOCATED,))}), ["nodes: no node has http"]),
        (topology(nodes={"a/b": topology().nodes[NodeName("n0")]}), ["nodes.a/b: a name is"]),
        (topology(cluster=Cluster(key_file=Path("/k"), name="../x")), ["cluster.name: a name is"]),
        (
            topology(cluster=Cluster(key_file=Path("/k"), heartbeat_s=3, silence_s=3)),
            ["cluster.heartbeat_s: heartbeat_s 3 is not less than silence_s 3"],
        ),
        (
            topology(Replica(role=Role.COLOCATED, page_tokens=17)),
            ["replicas[0].page_tokens: 17 is not a power"],
        ),
        (topology(Replica(role=Role.COLOCATED, page_tokens=512)), ["page_tokens: 512 is not a power"]),
        (
            topology(Replica(role=Role.COLOCATED, parallel=Parallel(tp=2, ep=4))),
            ["parallel.ep: ep 4 with tp 2 and dp 1: experts are shared by all 2 ranks"],
        ),
        (topology(Replica(role=Role.COLOCATED, cores=(1, 1))), ["cores: [1, 1] names a core twice"]),
        (
            topology(nodes={"a": Node(host="0.0.0.0", control_port=1, http=Http(port=2), replicas=(COLOCATED,))}),
            ["nodes.a.host: 0.0.0.0 is no address that peers can connect to"],
        ),
    ],
)
def test_each_rule(broken: Topology, expected: list[str]) -> None:
    found = told(broken)
    assert len(found) == len(expected), found
    for text, part in zip(found, expected, strict=True):
        assert part in text


def two_nodes(a_host: str, b_host: str, a_http: str, b_http: str, b_port: int = 8000) -> Topology:
    return topology(
        nodes={
            "a": Node(host=a_host, control_port=7000, http=Http(host=a_http, port=8000), replicas=(COLOCATED,)),
            "b": Node(host=b_host, control_port=7001, http=Http(host=b_http, port=b_port)),
        }
    )


def test_ports_clash_only_on_one_machine_and_address() -> None:
    assert len(told(two_nodes("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1"))) == 1
    assert len(told(two_nodes("127.0.0.1", "127.0.0.1", "127.0.0.1", "localhost"))) == 1
    assert len(told(two_nodes("127.0.0.1", "127.0.0.1", "127.0.0.1", "0.0.0.0"))) == 1
    assert len(told(two_nodes("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", b_port=7000))) == 1
    assert told(two_nodes("127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", b_port=8001)) == []
    assert told(two_nodes("192.0.2.1", "192.0.2.2", "127.0.0.1", "127.0.0.1")) == []


def test_loopback_and_shm_reach_only_one_machine() -> None:
    assert "another machine to each node" in told(two_nodes("127.0.0.1", "192.0.2.2", "127.0.0.1", "127.0.0.1"))[0]
    spread = two_nodes("192.0.2.1", "192.0.2.2", "127.0.0.1", "127.0.0.1")
    over_shm = topology(
        nodes={str(name): node for name, node in spread.nodes.items()}, fabric=Fabric(provider=Provider.SHM)
    )
    assert "shm reaches only one machine" in told(over_shm)[0]


def test_warnings() -> None:
    pinned = Replica(role=Role.COLOCATED, cores=(0, 1), threads=3)
    open_node = Node(control_port=80, http=Http(host="0.0.0.0", port=8000), replicas=(pinned, pinned))
    found = "\n".join(warnings(topology(nodes={"a": open_node})))
    assert "nodes.a.replicas[1] and nodes.a.replicas[0] share core 0, 1" in found
    assert "3 threads on 2 cores" in found
    assert "without an API key" in found
    assert "port 80 needs root" in found
    assert warnings(topology()) == []


def test_cores_of_other_machines_are_not_shared() -> None:
    pinned = Replica(role=Role.COLOCATED, cores=(0,))
    nodes = {
        f"n{i}": Node(host=f"192.0.2.{i}", control_port=7000, http=Http(port=8000), replicas=(pinned,)) for i in (1, 2)
    }
    assert warnings(topology(nodes=nodes)) == []


def test_local_checks(tmp_path: Path) -> None:
    short = Cluster(key_file=Path("/k"), run_dir=Path("/tmp"))
    core = min(os.sched_getaffinity(0))
    check_local(topology(Replica(role=Role.COLOCATED, cores=(core,)), cluster=short), NodeName("n0"))
    with pytest.raises(TopologyInvalid, match="node n9 is not in the topology: it has n0"):
        check_local(topology(), NodeName("n9"))
    long = Cluster(key_file=Path("/k"), run_dir=tmp_path / ("x" * 100))
    with pytest.raises(TopologyInvalid) as caught:
        check_local(topology(Replica(role=Role.COLOCATED, cores=(99999,)), cluster=long), NodeName("n0"))
    assert "core 99999 is not usable here" in str(caught.value)
    assert "cluster.run_dir" in str(caught.value)


@pytest.mark.parametrize(
    ("cores", "fault"),
    [
        ((1,), "progress_cores: 1 entry for 2 ranks: write one for each, or `[]`"),
        ((1, 2, 3), "progress_cores: 3 entries for 2 ranks"),
        ((1, ()), "progress_cores[1]: rank 1 has no core"),
        (((1, 2, 1), 3), "progress_cores[0]: [1, 2, 1] names a core twice"),
    ],
)
def test_what_is_no_map_of_progress_cores(cores: tuple[int | tuple[int, ...], ...], fault: str) -> None:
    replica = Replica(role=Role.COLOCATED, parallel=Parallel(tp=2), progress_cores=cores)
    (text,) = told(topology(replica))
    assert text.startswith(f"nodes.n0.replicas[0].{fault}")


@pytest.mark.parametrize("cores", [(), (1, 1), ((1, 2), 2)])
def test_progress_threads_may_share_cores(cores: tuple[int | tuple[int, ...], ...]) -> None:
    replica = Replica(role=Role.COLOCATED, parallel=Parallel(tp=2), progress_cores=cores)
    assert told(topology(replica)) == []


def test_progress_threads_on_executors_cores_are_a_warning() -> None:
    prefill = Replica(role=Role.PREFILL, cores=(0, 1), progress_cores=((1, 2),))
    decode = Replica(role=Role.DECODE, cores=(2, 3), progress_cores=(4,))
    texts = [text for text in warnings(topology(prefill, decode)) if "progress" in text]
    assert texts == [
        "nodes.n0.replicas[0]: its executors run on progress core 1: pages will arrive late",
        "nodes.n0.replicas[0]: nodes.n0.replicas[1]'s executors run on progress core 2: pages will arrive late",
    ]
    colocated = Replica(role=Role.COLOCATED, progress_cores=(4,))
    assert "its progress_cores are not used" in warnings(topology(colocated))[0]


def test_progress_cores_are_checked_on_their_own_machine() -> None:
    cluster = Cluster(key_file=Path("/k"), run_dir=Path("/tmp"))
    absent = Replica(role=Role.COLOCATED, parallel=Parallel(tp=2), progress_cores=(99999, (99999, 88888)))
    with pytest.raises(TopologyInvalid) as caught:
        check_local(topology(absent, cluster=cluster), NodeName("n0"))
    lines = str(caught.value).split("\n")
    assert [line.partition(" is not")[0] for line in lines] == [
        f"nodes.n0.replicas[0].progress_cores: core {core}" for core in (88888, 99999)
    ]


def test_cores_of_other_nodes_are_not_checked_here() -> None:
    cluster = Cluster(key_file=Path("/k"), run_dir=Path("/tmp"))
    nodes = {
        "a": Node(control_port=1, replicas=(Replica(role=Role.COLOCATED, cores=(99999,)),)),
        "b": Node(control_port=2),
    }
    check_local(topology(nodes=nodes, cluster=cluster), NodeName("b"))


def test_run_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/run/user/7")
    assert run_dir(topology()) == Path("/run/user/7/pdd/pdd")
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    assert run_dir(topology()) == Path(f"/tmp/pdd-{os.getuid()}/pdd")
    assert run_dir(topology(cluster=Cluster(key_file=Path("/k"), run_dir=Path("/x")))) == Path("/x")
    assert Path("/run/pdd") in run_roots()


def test_make_run_dir_refuses_one_that_others_can_write(tmp_path: Path) -> None:
    directory = tmp_path / "a" / "b"
    cluster = Cluster(key_file=Path("/k"), run_dir=directory)
    assert make_run_dir(topology(cluster=cluster)) == directory
    assert directory.stat().st_mode & 0o777 == 0o700
    assert make_run_dir(topology(cluster=cluster)) == directory
    directory.chmod(0o777)
    with pytest.raises(OperatorError, match="written by others"):
        make_run_dir(topology(cluster=cluster))
    (tmp_path / "file").write_text("")
    with pytest.raises(OperatorError, match="cannot make"):
        make_run_dir(topology(cluster=Cluster(key_file=Path("/k"), run_dir=tmp_path / "file" / "x")))


def test_a_clash_names_the_other_line(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "version: 1\ncluster: {key_file: k}\nmodel: {name: m, path: m}\nnodes:\n  a:\n    control_port: 7000\n"
        "    http: {port: 7000}\n    replicas: [{role: colocated}]\n"
    )
    with pytest.raises(TopologyInvalid, match=r":7:18: .*is taken by nodes.a.control_port \(line 6\)"):
        load(path)


def test_a_chunk_smaller_than_a_page_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        "version: 1\ncluster: {key_file: k}\nmodel: {name: m, path: m}\nnodes:\n  a:\n    control_port: 7000\n"
        "    http: {port: 7001}\n    replicas: [{role: colocated, page_tokens: 64, chunk_tokens: 32}]\n"
    )
    with pytest.raises(TopologyInvalid, match=r":8:.*chunk_tokens 32 is less than page_tokens 64"):
        load(path)
