"""The loader: what it builds from good files, and that it names every fault of bad ones at its place."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdd.base.errors import TopologyInvalid
from pdd.base.ids import NodeName
from pdd.topology import load as load_module
from pdd.topology.load import load
from pdd.topology.model import Fabric, Handoff, OnHandoffFailure, Provider, Role, SameHost

GOOD = """\
version: 1
cluster:
  key_file: keys/cluster.key
model:
  name: toy
  path: models/toy
nodes:
  n0:
    control_port: 7000
    http: {port: 8000}
    replicas:
      - role: colocated
"""


@pytest.fixture
def faults(tmp_path: Path) -> Callable[[str | bytes], list[str]]:
    """The lines of the error that a file's text leads to, without the file's name."""

    def load_text(text: str | bytes) -> list[str]:
        path = tmp_path / "t.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        with pytest.raises(TopologyInvalid) as caught:
            load(path)
        lines = str(caught.value).split("\n")
        assert all(line.startswith(str(path)) for line in lines)
        return [line.removeprefix(f"{path}:").strip() for line in lines]

    return load_text


def with_replica(text: str) -> str:
    return GOOD.replace("- role: colocated", f"- {{role: colocated, {text}}}")


def write(directory: Path, text: str) -> Path:
    path = directory / "t.yaml"
    path.write_text(text)
    return path


def test_defaults_and_paths_from_the_file_s_directory(tmp_path: Path) -> None:
    topology = load(write(tmp_path, GOOD))
    assert topology.cluster.key_file == tmp_path / "keys/cluster.key"
    assert topology.model.path == tmp_path / "models/toy"
    assert topology.handoff == Handoff()
    assert topology.nodes[NodeName("n0")].replicas[0].role is Role.COLOCATED
    assert list(topology.replicas(NodeName("n0"))) == ["n0/0"]


def test_paths_stay_absolute_when_the_file_is_named_relatively(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, GOOD)
    monkeypatch.chdir(tmp_path)
    assert load(Path("t.yaml")).model.path == tmp_path / "models/toy"


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    topology = load(write(tmp_path, GOOD.replace("models/toy", "~/m.gguf")))
    assert topology.model.path == Path("/home/someone/m.gguf")


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("4096", 4096),
        ("512 MiB", 512 * 2**20),
        ("512MiB", 512 * 2**20),
        ("'3 GiB'", 3 * 2**30),
        ("64 KiB", 65536),
    ],
)
def test_sizes(tmp_path: Path, written: str, num_bytes: int) -> None:
    topology = load(write(tmp_path, with_replica(f"kv_bytes: {written}")))
    assert topology.nodes[NodeName("n0")].replicas[0].kv_bytes == num_bytes


@pytest.mark.parametrize(("written", "seconds"), [("2", 2.0), ("0.5", 0.5), (".5", 0.5), ("1e1", 10.0)])
def test_seconds(tmp_path: Path, written: str, seconds: float) -> None:
    assert load(write(tmp_path, GOOD + f"limits: {{timeout_s: {written}}}\n")).limits.timeout_s == seconds


def test_enums_null_and_lists(tmp_path: Path) -> None:
    text = GOOD + "handoff: {on_failure: error}\nfabric: {provider: shm, same_host: fabric}\n"
    text = text.replace("colocated", "colocated\n        cores: [0, 1]\n        threads:\n        prefix_cache: false")
    topology = load(write(tmp_path, text))
    replica = topology.nodes[NodeName("n0")].replicas[0]
    assert topology.handoff.on_failure is OnHandoffFailure.ERROR
    assert topology.fabric == Fabric(provider=Provider.SHM, same_host=SameHost.FABRIC)
    assert (replica.cores, replica.threads, replica.prefix_cache) == ((0, 1), None, False)


def test_anchors_may_be_used(tmp_path: Path) -> None:
    text = GOOD.replace("- role: colocated", "- &one {role: colocated}\n      - *one")
    assert len(load(write(tmp_path, text)).nodes[NodeName("n0")].replicas) == 2


def test_every_fault_at_once_in_file_order(faults: Callable[[str], list[str]]) -> None:
    text = """\
version: 1
cluster:
  key_file: x.key
  heartbeat_s: 10s
model: {name: on, path: m, dtype: fp32}
model: 3
nodes:
  a:
    control_port: 7000
    http: {port: 7000}
    replicas:
      - {role: decode, kv_bites: 3, page_tokens: 32}
      - {role: decode, page_tokens: 17, kv_bytes: 512MB}
"""
    assert [line.split(": ")[0:2] for line in faults(text)] == [
        ["4:16", "cluster.heartbeat_s"],
        ["5:15", "model.name"],
        ["5:35", "model.dtype"],
        ["6:1", "model"],
        ["10:18", "nodes.a.http.port"],
        ["12:16", "nodes.a.replicas[0].role"],
        ["12:24", "nodes.a.replicas[0].kv_bites"],
        ["13:37", "nodes.a.replicas[1].page_tokens"],
        ["13:51", "nodes.a.replicas[1].kv_bytes"],
    ]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (with_replica("kv_bites: 1"), "12:27: nodes.n0.replicas[0].kv_bites: unknown key; did you mean kv_bytes?"),
        (GOOD + "zebra: 1\n", "known here: version, cluster"),
        (GOOD + "nodes: {}\n", "13:1: nodes: duplicate key; first at line 7, column 1"),
        (GOOD.replace("version: 1\n", ""), "1:1: version: missing"),
        (GOOD.replace("    control_port: 7000\n", ""), "9:5: nodes.n0.control_port: missing"),
        (GOOD.replace("{port: 8000}", "8000"), "10:11: nodes.n0.http: needs keys of its own: host, port, api_key_file"),
        (GOOD.replace("- role: colocated", "role: colocated"), "replicas: needs a list"),
        (GOOD.replace("name: toy", "name: [toy]"), "model.name: needs one value, not a list"),
        (GOOD.replace("name: toy", "name: on"), "YAML reads 'on' as true or false: put it into quotes"),
        (GOOD.replace("name: toy", "name: 1:30"), "YAML reads '1:30' as a number: put it into quotes"),
        (GOOD.replace("name: toy", "name:"), "5:8: model.name: empty"),
        (GOOD.replace("name: toy", 'name: "a\\nb"'), "control character"),
        (GOOD.replace("name: toy", 'name: "  "'), "empty"),
        (GOOD.replace("path: models/toy", "path: ~"), "6:9: model.path: empty"),
        (GOOD.replace("7000", "0o17"), "whole number"),
        (GOOD.replace("7000", "010"), "YAML reads it as 8"),
        (GOOD.replace("7000", "1:30"), "YAML reads it as 90"),
        (GOOD.replace("7000", "7_000"), "YAML reads it as 7000"),
        (GOOD.replace("7000", "7000.0"), "is not a whole number"),
        (GOOD.replace("7000", "'7000'"), "without quotes"),
        (GOOD.replace("7000", "yes"), "YAML reads it as true"),
        (GOOD.replace("7000", "null"), "empty: a whole number"),
        (GOOD.replace("7000", "9" * 5000), "is not a whole number"),
        (GOOD.replace("7000", "2026-11-29"), "is not a whole number"),
        (GOOD.replace("7000", "70000"), "70000 is too large: at most 65535"),
        (GOOD.replace("7000", "0"), "0 is too small: at least 1"),
        (with_replica("prefix_cache: yes"), "'yes' is neither true nor false"),
        (with_replica("kv_bytes: 512 MB"), "whole KiB, MiB or GiB, such as 512 MiB"),
        (with_replica("kv_bytes: 1.5 GiB"), "whole KiB, MiB or GiB, such as 512 GiB"),
        (with_replica("kv_bytes: lots"), "is not a size"),
        (with_replica("kv_bytes: 0"), "too small"),
        (with_replica("kv_bytes: 999999999 GiB"), "too large"),
        (with_replica("role: x"), "duplicate key"),
        (GOOD.replace("colocated", "both"), "'both' is none of: prefill, decode or colocated"),
        (GOOD + "limits: {timeout_s: 10s}\n", "the field is in seconds, write 10"),
        (GOOD + "limits: {timeout_s: 500ms}\n", "the field is in seconds, write 0.5"),
        (GOOD + "limits: {timeout_s: 2 min}\n", "the field is in seconds, write 120"),
        (GOOD + "limits: {timeout_s: .inf}\n", "is not a number of seconds"),
        (GOOD + "limits: {timeout_s: .nan}\n", "is not a number of seconds"),
        (GOOD + "limits: {timeout_s: 0}\n", "more than 0"),
        (GOOD + "limits: {timeout_s: '10'}\n", "without quotes"),
        (GOOD + "limits:\n  <<: {max_queue: 1}\n", "merge keys"),
        (GOOD + "limits: {max_queue: !!python/object/apply:os.system [echo]}\n", "needs one value, not a list"),
        (GOOD + "limits: {max_queue: !secret x}\n", "tags"),
        (GOOD + "? [a, b]\n: 1\n", "a key must be one plain word"),
        (GOOD.replace("n0:", "on:"), "does not read the key 'on' as a text"),
        (GOOD.replace("n0:", "7:"), "does not read the key '7' as a text"),
        (GOOD + "---\na: 1\n", "13:1: a second document"),
        (GOOD + "limits:\n\tmax_queue: 1\n", "14:1: a tab"),
        (GOOD + "limits: {max_queue: 1\n", "not YAML"),
        (GOOD + "limits: *nothing\n", "undefined alias"),
        ("", "1:1: the file is empty"),
        ("# only this\n", "1:1: the file is empty"),
        ("just words\n", "needs keys of its own: version, cluster"),
        ("- a\n", "needs keys of its own"),
        ("a: \x01\n", "1:4: a control character"),
        ("[" * 20_000, "nested too deeply"),
        (b"version: 1\n  \xff\n", "2:3: not UTF-8"),
        ("version: 1\n".encode("utf-16"), "1:1: not UTF-8"),
    ],
)
def test_one_fault(faults: Callable[[str | bytes], list[str]], text: str | bytes, fault: str) -> None:
    found = faults(text)
    assert any(fault in line for line in found), found


def test_a_wrong_value_silences_the_rules_that_would_rely_on_it(faults: Callable[[str], list[str]]) -> None:
    assert faults(GOOD.replace("colocated", "decod")) == [
        "12:15: nodes.n0.replicas[0].role: 'decod' is none of: prefill, decode or colocated"
    ]
    assert len(faults(GOOD.replace("    replicas:", "    replcas:"))) == 1
    assert len(faults(GOOD.replace("    http:", "    htp:"))) == 1


def test_a_key_file_in_place_of_a_topology_is_not_shown(faults: Callable[[bytes], list[str]]) -> None:
    assert not any("hunter2" in line for line in faults(b"hunter2hunter2hunter2\n"))


def test_long_and_odd_words_are_cut(faults: Callable[[str], list[str]]) -> None:
    lines = faults(GOOD.replace("role: colocated", "role: " + "x" * 10_000) + f"{'y' * 5000}: 1\n")
    assert all(len(line) < 300 for line in lines)


def test_at_most_a_hundred_faults_are_listed(faults: Callable[[str], list[str]]) -> None:
    lines = faults(GOOD + "".join(f"zebra{i}: 1\n" for i in range(300)))
    assert len(lines) == 101
    assert "200 more faults" in lines[-1]


def test_aliases_cannot_multiply_without_bound(faults: Callable[[str], list[str]]) -> None:
    replicas = ", ".join(["*r"] * 1000)
    text = GOOD.replace("\n      - role: colocated", f" &rs [&r {{role: colocated}}, {replicas}]")
    nodes = "".join(f"  m{i}: {{control_port: {1024 + i}, replicas: *rs}}\n" for i in range(500))
    assert faults(text + nodes) == ["1:1: the file's aliases multiply into too many values: write them out"]


def test_a_recursive_alias_ends(faults: Callable[[str], list[str]]) -> None:
    assert faults("&top\nversion: *top\nnodes: *top\ncluster: *top\nmodel: *top\n")


@pytest.mark.parametrize(
    ("name", "text"), [("", "is a directory"), ("absent.yaml", "no such file"), ("a\0b", "cannot be read")]
)
def test_files_that_cannot_be_read(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(TopologyInvalid, match=text) as caught:
        load(tmp_path / name)
    assert caught.value.exit_code == 4


def test_a_huge_file_is_not_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    with path.open("wb") as file:
        file.truncate(10 * 2**30)
    with pytest.raises(TopologyInvalid, match="larger than"):
        load(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(st.binary(max_size=200) | st.text(alphabet="-:{}[]&*!|>'\"#%@`?, \n\tab01", max_size=60).map(str.encode))
def test_no_bytes_lead_to_anything_but_an_error(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "t.yaml"
    path.write_bytes(raw)
    with pytest.raises(TopologyInvalid):
        load(path)


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates()
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200)
@given(data=st.data())
def test_any_value_in_any_place_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    tree = yaml.safe_load(GOOD)
    tree["nodes"]["n0"]["replicas"][0].update(cores=[0], kv_bytes=4096, threads=1, prefix_cache=True)
    place = tree
    while True:
        keys = list(place) if isinstance(place, dict) else range(len(place))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(VALUES)
    path = tmp_path / "t.yaml"
    path.write_text(yaml.safe_dump(tree, allow_unicode=True))
    with contextlib.suppress(TopologyInvalid):
        load(path)


def test_the_size_bound_lets_a_large_cluster_through(tmp_path: Path) -> None:
    nodes = "".join(
        f"  n{i}:\n    host: 192.0.2.{i}\n    control_port: 7000\n    replicas: [{{role: colocated}}]\n"
        for i in range(1, 255)
    )
    text = GOOD.replace("  n0:\n", "  n0:\n    host: 198.51.100.1\n") + nodes
    assert len(text) < load_module.MAX_FILE_BYTES
    assert len(load(write(tmp_path, text)).nodes) == 255
