"""pdctl against daemons that answer well, badly or not at all."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from sysfs_machines import DGX_H100, build

from pdd.control import client
from pdd.control.main import main
from pdd.topology import run_dir as run_dir_module
from pdd.wire.admin import (
    AdminError,
    AdminReply,
    AdminRequest,
    CancelResult,
    DrainResult,
    KvReport,
    KvReports,
    NicStatus,
    PageOwner,
    PeerRow,
    Peers,
    ReplicaStatus,
    RequestRow,
    Requests,
    Status,
    Stories,
    Story,
    StoryLine,
)

EXAMPLES = Path(__file__).parents[3] / "topology"
Answers = Callable[[AdminRequest], AdminReply | bytes]


class FakeDaemon:
    """An admin socket in a thread; `answers` decides each reply, raw bytes included."""

    def __init__(self, path: Path, answers: Answers) -> None:
        self.asked: list[AdminRequest] = []
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection, connection.makefile("rb") as lines:
                for line in lines:
                    if line == b"stop\n":
                        return
                    request = msgspec.json.decode(line, type=AdminRequest)
                    self.asked.append(request)
                    reply = self._answers(request)
                    connection.sendall(reply if isinstance(reply, bytes) else msgspec.json.encode(reply) + b"\n")
                    if isinstance(reply, bytes):
                        break

    def stop(self) -> None:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(self._listener.getsockname())
            connection.sendall(b"stop\n")
        self._thread.join()
        self._listener.close()


Start = Callable[..., FakeDaemon]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run directory of the only cluster that pdctl can find."""
    monkeypatch.setattr(run_dir_module, "run_roots", lambda: [tmp_path])
    monkeypatch.setattr("pdd.control.sockets.run_roots", lambda: [tmp_path])
    monkeypatch.delenv("PDD_TOPOLOGY", raising=False)
    directory = tmp_path / "c"
    directory.mkdir()
    return directory


@pytest.fixture
def start(cluster: Path) -> Iterator[Start]:
    daemons: list[FakeDaemon] = []

    def make(node: str, answers: Answers, directory: Path | None = None) -> FakeDaemon:
        daemons.append(FakeDaemon((directory or cluster) / f"{node}.sock", answers))
        return daemons[-1]

    yield make
    for daemon in daemons:
        daemon.stop()


def replies(*results: msgspec.Struct) -> Answers:
    """Answers each command with the result whose type it promises."""
    kinds = {"status": Status, "requests": Requests, "story": Stories, "cancel": CancelResult, "kv": KvReports}
    kinds |= {"peers": Peers, "drain": DrainResult, "resume": DrainResult}

    def answer(request: AdminRequest) -> AdminReply:
        for result in results:
            if isinstance(result, kinds[request.command]):
                return AdminReply(result=msgspec.to_builtins(result))
        return AdminReply(error=AdminError(code="not_found", message=f"no request {request.request} here"))

    return answer


def status(node: str) -> Status:
    replica = ReplicaStatus(
        name=f"{node}/0",
        role="decode",
        state="ready",
        reason="",
        num_queued=1,
        num_running=2,
        free_pages=3,
        cached_pages=4,
        quarantined_pages=5,
        num_pages=14,
        steps=99,
        provider="tcp",
        nics=(NicStatus(rank=0, nic=0, host="127.0.0.1", sent_bytes=1, arrived_pieces=2, failed_paths=0),) * 6,
        copied_bytes=3,
        failed_copies=0,
        fabric_gigabytes_per_s=2.5,
    )
    return Status(
        node=node,
        incarnation="ab" * 8,
        version="0.1",
        pid=7,
        uptime_s=75.0,
        ready=True,
        reason="all well",
        model="toy",
        http="127.0.0.1:8000",
        draining=False,
        unfinished=0,
        replicas=(replica,),
        counters={"local_prefills": 3, "strays": 0},
    )


def row(request: str, side: str) -> RequestRow:
    return RequestRow(
        request=request,
        side=side,
        state="decoding",
        age_s=1.5,
        state_s=0.0123,
        prompt_tokens=40,
        output_tokens=2,
        pages=3,
        peer="prefill0/0",
    )


def story(side: str) -> Story:
    lines = (
        StoryLine(at_s=0.0, state="queued", reason=""),
        StoryLine(at_s=0.5, state="prefilling", reason="ticket sent"),
        StoryLine(at_s=0.75, state="decoding", reason="all pages in place"),
        StoryLine(at_s=1.0, state="finished", reason="stop"),
    )
    return Story(
        request="cmpl-1",
        side=side,
        replica="decode0/0",
        peer="prefill0/0",
        prompt_tokens=40,
        cached_tokens=16,
        output_tokens=2,
        lines=lines,
        seconds_in={"queued": 0.5, "prefilling": 0.25, "decoding": 0.25},
        pieces=6,
        bytes=3 * 2**20,
        gigabytes_per_s=1.25,
        landed_before_prefill_end=0.875,
        ready_after_prefill_end_s=0.004,
        ttft_s=0.8,
    )


def test_status_of_every_node_found(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("decode0", replies(status("decode0")))
    start("prefill0", replies(status("prefill0")))
    assert main(["status"]) == 0
    shown = capsys.readouterr().out
    for word in ("decode0", "prefill0/0", "ready", "127.0.0.1:8000", "75.0 s", "2.50", "local_prefills"):
        assert word in shown
    assert "strays" not in shown, "counters at zero only take room"


def test_status_tells_copies_failed_paths_and_each_of_several_nics(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    found = status("decode0")
    nics = tuple(
        NicStatus(
            rank=0, nic=nic, host=f"10.0.{nic}.1", sent_bytes=nic << 20, arrived_pieces=40 + nic, failed_paths=3 * nic
        )
        for nic in range(2)
    )
    replica = msgspec.structs.replace(found.replicas[0], nics=nics, copied_bytes=5 << 20, failed_copies=4)
    start("decode0", replies(msgspec.structs.replace(found, replicas=(replica,))))
    assert main(["status"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    [shown] = [row for row in rows if row[:2] == ["decode0/0", "decode"]]
    assert shown[-4:] == ["2.50", "5.0", "MiB", "7"], "of NICs and of copies"
    assert ["decode0/0", "0", "0", "10.0.0.1", "0.0", "MiB", "40", "0"] in rows
    assert ["decode0/0", "0", "1", "10.0.1.1", "1.0", "MiB", "41", "3"] in rows


def test_one_nic_a_rank_has_no_table_of_its_own(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("decode0", replies(status("decode0")))
    assert main(["status"]) == 0
    assert "ARRIVED PIECES" not in capsys.readouterr().out


def test_json_and_yaml_have_the_same_shape_for_one_node_and_for_many(
    start: Start, capsys: pytest.CaptureFixture[str]
) -> None:
    start("decode0", replies(status("decode0"), Requests(requests=(row("cmpl-1", "decode"),))))
    assert main(["status", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == [msgspec.json.decode(msgspec.json.encode(status("decode0")))]
    assert main(["requests", "-o", "yaml", "--node", "decode0"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == [
        {"node": "decode0", **msgspec.to_builtins(row("cmpl-1", "decode"))}
    ]


def test_story_tells_both_sides(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("decode0", replies(Stories(stories=(story("decode"),))))
    start("prefill0", replies(Stories(stories=(story("prefill"),))))
    start("other", replies())
    assert main(["story", "cmpl-1"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    assert shown.out.index("decode side") < shown.out.index("prefill side")
    for word in ("3.0 MiB, 1.25 GB/s from the first to the last", "87.5%", "4.0 ms", "800 ms", "16 of them cached"):
        assert word in shown.out


def test_story_of_nobody(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = start("decode0", replies())
    assert main(["story", "cmpl-9"]) == 1
    assert "no node knows a request cmpl-9" in capsys.readouterr().err
    assert daemon.asked == [AdminRequest(command="story", request="cmpl-9")]


def test_kv_fails_when_a_pool_contradicts_itself(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*problems: str) -> KvReports:
        owner = PageOwner(owner="cmpl-1", pages=2, quarantined=True)
        one = KvReport(
            replica="decode0/0",
            num_pages=10,
            page_bytes=2**18,
            num_layers=4,
            free=8,
            cached=0,
            owned=0,
            quarantined=2,
            owners=(owner,),
            hit_tokens=1,
            queried_tokens=4,
            problems=problems,
        )
        return KvReports(replicas=(one,))

    answers = [report(), report("page 3 has two owners")]
    start("decode0", lambda _: AdminReply(result=msgspec.to_builtins(answers.pop(0))))
    assert main(["kv"]) == 0
    shown = capsys.readouterr().out
    assert "10.0 MiB" in shown
    assert "25.0%" in shown
    assert "quarantined" in shown
    assert main(["kv"]) == 1
    assert "page 3 has two owners" in capsys.readouterr().out


def test_peers(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    peer = PeerRow(
        node="prefill0",
        address="127.0.0.1:7411",
        state="up",
        reason="",
        incarnation="cd" * 8,
        silent_s=0.2,
        replicas=("prefill0/0",),
        links=1,
        way="2 of 3 paths",
    )
    start("decode0", replies(Peers(peers=(peer,))))
    assert main(["peers", "-o", "json"]) == 0
    [shown] = json.loads(capsys.readouterr().out)
    assert (shown["node"], shown["peer"]) == ("decode0", "prefill0")
    assert main(["peers"]) == 0
    out = capsys.readouterr().out
    assert "127.0.0.1:7411" in out
    assert "2 of 3 paths" in out


def test_cancel_goes_to_the_decode_side(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Requests(requests=(row("cmpl-1a", side),)) for side in ("decode", "prefill")]
    result = CancelResult(request="cmpl-1a", state="draining")
    decode = start("z-decode", replies(rows[0], result))
    prefill = start("a-prefill", replies(rows[1], result))
    assert main(["cancel", "cmpl-1"]) == 0
    assert "z-decode: draining" in capsys.readouterr().out
    assert AdminRequest(command="cancel", request="cmpl-1") in decode.asked
    assert [request.command for request in prefill.asked] == ["requests"]


def test_cancel_of_an_ambiguous_or_unknown_request(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("a", replies(Requests(requests=(row("cmpl-1a", "decode"), row("cmpl-1b", "decode")))))
    start("b", replies(Requests(requests=())))
    assert main(["cancel", "cmpl-1"]) == 2
    assert "the beginning of 2 requests" in capsys.readouterr().err
    assert main(["cancel", "cmpl-2"]) == 1


def test_drain_needs_one_node(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = start("a", replies(DrainResult(draining=True, unfinished=3)))
    start("b", replies())
    assert main(["drain"]) == 2
    assert "--node a | b" in capsys.readouterr().err
    assert main(["drain", "--node", "a"]) == 0
    assert "3 unfinished" in capsys.readouterr().out
    assert main(["resume", "--node", "a"]) == 0
    assert [request.command for request in daemon.asked] == ["drain", "resume"]
    assert main(["drain", "--node", "c"]) == 2


def unfinished(*numbers: int, draining: bool = True) -> Answers:
    """One of these numbers for each question."""
    left = list(numbers)

    def answer(request: AdminRequest) -> AdminReply:
        now = left.pop(0)
        if request.command == "drain":
            return AdminReply(result=msgspec.to_builtins(DrainResult(draining=True, unfinished=now)))
        found = msgspec.structs.replace(status("a"), draining=draining, unfinished=now)
        return AdminReply(result=msgspec.to_builtins(found))

    return answer


def test_drain_waits_until_nothing_is_unfinished(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    daemon = start("a", unfinished(3, 3, 1, 0))
    assert main(["drain", "--wait", "--node", "a"]) == 0
    output = capsys.readouterr()
    assert output.err == "a: 3 unfinished\na: 1 unfinished\n"
    assert output.out == "a takes no new requests; 0 unfinished\n"
    assert [request.command for request in daemon.asked] == ["drain", "status", "status", "status"]


def test_a_drain_that_waits_for_nothing_asks_once(start: Start) -> None:
    daemon = start("a", unfinished(0))
    assert main(["drain", "--wait", "--node", "a"]) == 0
    assert len(daemon.asked) == 1


def test_a_drain_that_is_undone_meanwhile_has_failed(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("a", unfinished(2, 1, draining=False))
    assert main(["drain", "--wait", "--node", "a"]) == 1
    assert "a was resumed with 1 unfinished" in capsys.readouterr().err


def test_a_refusal_is_exit_code_1(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("a", lambda _: AdminReply(error=AdminError(code="bad_request", message="\x1b[2Jno\nway")))
    assert main(["status"]) == 1
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "no" in shown


def test_nothing_runs(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status"]) == 3
    assert "no daemon runs here" in capsys.readouterr().err
    assert main(["status", "--socket", str(cluster / "x.sock")]) == 3
    assert "no such socket" in capsys.readouterr().err


def test_a_socket_that_a_dead_daemon_left(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cluster / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert main(["status", "--socket", str(path)]) == 3
    assert "nobody listens" in capsys.readouterr().err
    assert main(["status"]) == 3


@pytest.mark.parametrize(
    ("raw", "exit_code", "text"),
    [
        (b"", 3, "without an answer"),
        (b'{"result": {"no', 3, "in the middle of an answer"),
        (b"\xff\xfe garbage\n", 1, "no reply of this version"),
        (b"[]\n", 1, "no reply of this version"),
        (b'{"result": null}\n', 1, "no reply of this version"),
        (b'{"result": {"node": 5}}\n', 1, "no reply of this version"),
        (b"[" * 100_000 + b"\n", 1, "no reply of this version"),
        (b'{"error": {"code": "x", "message": "y"}}\n', 1, "y"),
    ],
)
def test_garbage(start: Start, capsys: pytest.CaptureFixture[str], raw: bytes, exit_code: int, text: str) -> None:
    start("a", lambda _: raw)
    assert main(["status"]) == exit_code
    shown = capsys.readouterr()
    assert text in shown.err
    assert shown.out == ""


def test_an_endless_answer_is_cut(
    start: Start, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "MAX_REPLY_BYTES", 2**20)
    start("a", lambda _: b"x" * (2**20 + 1))
    assert main(["status"]) == 3
    assert "longer than 1 MiB" in capsys.readouterr().err


def test_a_daemon_that_hangs(cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = cluster / "a.sock"
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        with pytest.raises(client.UnreachableError, match=r"no answer within 0\.05 s"):
            client.ask(path, AdminRequest(command="status"), Status, timeout_s=0.05)


def test_what_the_others_say_is_shown_when_one_node_fails(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    start("a", replies(status("a")))
    start("b", lambda _: b"")
    assert main(["status"]) == 3
    shown = capsys.readouterr()
    assert "a/0" in shown.out
    assert "pdctl: b: " in shown.err


def test_two_clusters_must_be_told_apart(start: Start, cluster: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = cluster.parent / "d"
    other.mkdir()
    start("a", replies(status("a")))
    start("a", replies(status("a")), other)
    assert main(["status"]) == 2
    assert "several clusters" in capsys.readouterr().err
    assert main(["status", "--socket", str(other / "a.sock")]) == 0


def test_a_topology_names_the_sockets(
    start: Start, cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.yaml"
    text = (EXAMPLES / "local.yaml").read_text()
    path.write_text(text.replace("  name: local", f"  name: local\n  run_dir: {cluster}"))
    start("decode0", replies(status("decode0")))
    start("unrelated", replies(status("unrelated")))
    assert main(["status", "--topology", str(path)]) == 0
    assert "unrelated" not in capsys.readouterr().out
    assert main(["status", "--topology", str(path), "--node", "prefill0"]) == 3
    monkeypatch.setenv("PDD_TOPOLOGY", str(path))
    assert main(["status", "--node", "nobody"]) == 2
    assert "there are prefill0, decode0" in capsys.readouterr().err


def test_watch_shows_again_until_interrupted(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    start("a", replies(status("a")))
    waited: list[float] = []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("pdd.control.main.time.sleep", sleep)
    assert main(["status", "-w", "2"]) == 0
    assert capsys.readouterr().out.count("a/0") == 2
    assert waited == [2.0, 2.0]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["story"],
        ["status", "-o", "xml"],
        ["status", "-w", "0"],
        ["status", "-w", "x"],
        ["topology"],
        ["status", "--socket", "a", "--topology", "b"],
    ],
)
def test_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: pdctl" in capsys.readouterr().err


def test_topology_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "check", str(EXAMPLES / "local.yaml")]) == 0
    assert "valid: 2 nodes; replicas: 1 prefill, 1 decode" in capsys.readouterr().out
    bad = tmp_path / "bad.yaml"
    bad.write_text("version: 1\nnodse: {}\n")
    assert main(["topology", "check", str(bad)]) == 4
    assert "did you mean nodes?" in capsys.readouterr().err
    assert main(["topology", "check", "-o", "json", str(bad)]) == 4
    shown: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert shown["valid"] is False
    assert len(shown["faults"]) == 3


def test_topology_show_has_a_row_for_each_replica_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        """\
version: 1
cluster: {key_file: key}
model: {name: toy, path: model}
nodes:
  p:
    control_port: 7000
    replicas: [{role: prefill, parallel: {tp: 2}, nics: [[a, b], [c, d]]}]
  d:
    control_port: 7001
    http: {port: 8000}
    replicas: [{role: decode, parallel: {tp: 2, dp: 2}}, {role: decode, parallel: {dp: 2}, nics: [e, f]}]
"""
    )
    assert main(["topology", "show", str(path)]) == 0
    header, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert header[:4] == ["REPLICA", "ROLE", "RANKS", "CONTROL"]
    assert [(row[0], row[2]) for row in rows] == [
        ("p/0", "0-1"), ("d/0.0", "0-1"), ("d/0.1", "2-3"), ("d/1.0", "0"), ("d/1.1", "1"),
    ]  # fmt: skip
    assert rows[0][4:6] == ["a+b", "c+d"]
    assert [row[5] for row in rows[1:]] == ["auto", "auto", "e", "f"]


def test_topology_show_has_the_cores_of_progress_threads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.yaml"
    path.write_text(
        """\
version: 1
cluster: {key_file: key}
model: {name: toy, path: model}
nodes:
  n:
    control_port: 7000
    http: {port: 8000}
    replicas:
      - {role: prefill, cores: [0], progress_cores: []}
      - {role: decode, cores: [1], parallel: {dp: 2}, progress_cores: [[2, 3], 4]}
      - {role: decode, cores: [5]}
"""
    )
    assert main(["topology", "show", str(path)]) == 0
    _, *rows = [line.split() for line in capsys.readouterr().out.splitlines()[2:]]
    assert [row[6:8] for row in rows] == [["0", "all"], ["1", "2+3"], ["1", "4"], ["5", "auto"]]


def test_topology_discover_prints_a_topology(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sysfs = build(tmp_path / "sys", DGX_H100)
    path = tmp_path / "t.yaml"
    assert main(["topology", "discover", "--sysfs", str(sysfs), "--role", "decode"]) == 0
    path.write_text(capsys.readouterr().out)
    assert main(["topology", "check", str(path)]) == 0
    assert "warning" not in capsys.readouterr().out
    assert main(["topology", "discover", "--sysfs", str(sysfs), "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["ranks"][1]["nics"][0]["name"] == "mlx5_3"
    assert len(shown["machine"]["gpus"]) == 8


def test_topology_discover_on_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("prefill", "decode", "colocated"):
        assert main(["topology", "discover", "--role", role]) == 0
        path = tmp_path / f"{role}.yaml"
        path.write_text(capsys.readouterr().out)
        assert main(["topology", "check", str(path)]) == 0
        assert "valid" in capsys.readouterr().out
    last = max(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {last})
    assert main(["topology", "discover"]) == 0
    assert f" {last},  # rank 0" in capsys.readouterr().out, "only what this process may use"
    assert main(["topology", "discover", "--sysfs", str(tmp_path)]) == 1
    assert "no sysfs" in capsys.readouterr().err
    assert main(["topology", "discover", "--role", "both"]) == 2
    assert "(choose from 'prefill', 'decode', 'colocated')" in capsys.readouterr().err


def test_topology_show_and_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "show", str(EXAMPLES / "local.yaml")]) == 0
    assert "720.0 MiB" in capsys.readouterr().out
    assert main(["topology", "show", "-o", "yaml", str(EXAMPLES / "local.yaml")]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["nodes"]["decode0"]["http"]["port"] == 8000
    assert main(["topology", "schema"]) == 0
    assert capsys.readouterr().out == (EXAMPLES / "schema.json").read_text()
    assert main(["topology", "show", "/nonexistent.yaml"]) == 4
