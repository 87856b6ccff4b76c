"""`pdd bench fabric` as a whole, on few bytes: what it prints, and its exit codes. No figure is asserted."""

import argparse
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from pdd.base.errors import FabricUnavailable, OperatorError
from pdd.bench import fabric, plot, swept
from pdd.bench.compare import Report
from pdd.bench.contender import Running
from pdd.bench.peers.pair import Took
from pdd.fabric.libfabric import SHARED_MEMORY

TINY = ["--arena-mib", "1", "--page-kib", "4", "64", "--latency-kib", "4", "--rounds", "2", "--writes", "4"]


def run(*options: str) -> int:
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser)
    return fabric.run(parser.parse_args([*TINY, *options]))


def test_machine_limits_beside_pdd(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--vs", "memcpy,tcp", "--json") == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    names = ["pdd net", "pdd copy", "memcpy", "tcp-vectored", "tcp-paged"]
    assert [(each.contender, each.page_bytes, len(each.seconds)) for each in report.throughput] == [
        (name, page_bytes, 2) for page_bytes in (4096, 65536) for name in names
    ]
    assert [(each.contender, each.num_pages, len(each.seconds)) for each in report.latency] == [
        (name, 1, 4) for name in names
    ]
    assert all(seconds > 0 for each in report.throughput for seconds in each.seconds)
    for each in report.latency:  # only pdd's own targets run a loop
        assert len(each.looped_seconds) == (4 if each.contender.startswith("pdd") else 0)
        assert all(looped > plain for looped, plain in zip(each.looped_seconds, each.seconds, strict=False))
    assert report.posting is not None
    posting = report.posting
    assert len(posting.write) == len(posting.write_waking) == len(posting.announce_waking) == 4
    assert all(0 < part < whole for part, whole in zip(posting.write_waking, posting.announce_waking, strict=True))
    assert not report.left_out
    versions = {each.contender.name: each.version for each in report.entrants}
    assert versions["pdd copy"] == "copies between mapped arenas (memfd)"
    assert versions["pdd net"].startswith("net, libfabric")
    assert not any(each.failure for each in report.entrants)


def test_what_is_not_there_is_left_out_with_a_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mooncake.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert run("--vs", "mooncake,memcpy", "--provider", "shm") == 0
    out = capsys.readouterr().out
    assert "left out: mooncake: No module named 'mooncake.engine'" in out
    assert "pdd shm / peer" in out
    with pytest.raises(OperatorError, match="no peer to compare with: mooncake: No module"):
        run("--vs", "mooncake", "--provider", "shm")


def test_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--provider", "net,tcp") == 0
    out = capsys.readouterr().out
    assert "until the target has counted every page" in out
    assert "times as long" in out
    assert "Python cost of one write of 1000 pages" in out


def test_a_provider_that_is_not_there_is_an_error() -> None:
    with pytest.raises(FabricUnavailable, match="no-such"):
        run("--provider", "no-such")


def test_the_peers_interpreter_may_be_given_by_a_relative_path_or_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = argparse.ArgumentParser()
    fabric.add_arguments(parser)
    python = Path(sys.executable)
    monkeypatch.chdir(python.parent)
    monkeypatch.setenv("PATH", str(python.parent))
    for text in (f"./{python.name}", python.name):
        assert parser.parse_args(["--peer-python", text]).peer_python == python


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def endpoints(pids: Sequence[int]) -> list[Path]:
    """Of these processes: others of this machine come and go."""
    return [path for pid in pids for path in SHARED_MEMORY.glob(f"pdd-{pid}:*")]


def test_both_processes_close_their_ports_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Watched(Running):
        def turn(self, page_bytes: int, num_pages: int, count: int) -> list[Took]:
            pids[:] = [self._process.pid, *children(self._process.pid)]
            assert all(endpoints([pid]) for pid in pids)
            return super().turn(page_bytes, num_pages, count)

    monkeypatch.setattr(fabric, "Running", Watched)
    monkeypatch.setattr(swept, "sweep_dead_endpoints", lambda _: [])
    assert run("--provider", "shm") == 0
    assert len(pids) == 2
    assert not endpoints(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_bench_that_is_stopped_leaves_no_endpoints(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "pdd.bench", "fabric", "--provider", "shm", "--rounds", "1000000", *TINY[:5]]
    pids: list[int] = []
    with subprocess.Popen(command, stderr=subprocess.PIPE) as bench:
        while len(pids) < 2 or not all(endpoints([pid]) for pid in pids):  # the source's and the target's
            with pytest.raises(subprocess.TimeoutExpired):
                bench.wait(0.01)
            targets = children(bench.pid)
            pids = [*targets, *(source for target in targets for source in children(target))]
        bench.send_signal(number)
        assert bench.communicate(timeout=30)[1] == b""
    assert bench.returncode == 128 + number
    assert not endpoints(pids)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_transfer_that_is_stopped_leaves_no_endpoints(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "pdd.bench", "transfer", "--from", "tp1", "--to", "tp1", "--provider", "shm"]
    command += ["--rounds", "1000000"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as bench:
        while not endpoints([bench.pid]):
            with pytest.raises(subprocess.TimeoutExpired):
                bench.wait(0.01)
        time.sleep(0.1)
        bench.send_signal(number)
        assert bench.communicate(timeout=30)[1] == b""
    assert bench.returncode == 128 + number
    assert not endpoints([bench.pid])


def test_what_killed_processes_left_is_swept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(swept, "SHARED_MEMORY", tmp_path)
    with swept.swept():
        (tmp_path / "pdd-99999999:0:1").touch()
        (tmp_path / f"pdd-{os.getpid()}:0:1").touch()
    assert [path.name for path in tmp_path.iterdir()] == [f"pdd-{os.getpid()}:0:1"]


def test_a_page_larger_than_a_round_is_an_error() -> None:
    with pytest.raises(OperatorError, match="larger than the 1 MiB of a round"):
        run("--page-kib", "2048")


@pytest.mark.parametrize("options", [["--vs", "nobody"], ["--rounds", "0"], ["--arena-mib", "much"]])
def test_wrong_usage_ends_with_2(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(*options)
    assert ended.value.code == 2
    assert options[1] in capsys.readouterr().err


def test_a_picture_without_matplotlib_is_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(OperatorError, match=r"--plot needs matplotlib.*--json"):
        run("--plot", "figure.png")


def test_a_picture_needs_its_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())
    with pytest.raises(OperatorError, match="there is no directory"):
        plot.check_plot(tmp_path / "nowhere" / "figure.png")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("figure.foo", "its ending is none of .*png"),
        ("figure", "its ending is none of"),
        ("directory.png", "something else than a file"),
        ("/proc/figure.png", "cannot be written"),
    ],
)
def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    name: str, fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "directory.png").mkdir()
    monkeypatch.setattr(fabric, "Running", lambda *_: pytest.fail("something was started"))
    with pytest.raises(OperatorError, match=fault):
        run("--plot", str(tmp_path / name))
    plot.check_plot(tmp_path / "figure.PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["directory.png"], "a check leaves nothing"


def test_a_picture_that_fails_comes_after_the_table(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "full.png").symlink_to("/dev/full")
    monkeypatch.setattr(fabric, "check_plot", lambda _: None)
    with pytest.raises(OperatorError, match=r"full\.png cannot be written: No space left"):
        run("--provider", "copy", "--plot", str(tmp_path / "full.png"))
    assert "Python cost of one write" in capsys.readouterr().out


@pytest.mark.parametrize("providers", [["copy", "net", "copy"], ["net", "net,tcp"]])
def test_a_name_in_the_tables_stands_for_one(providers: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabric, "Running", lambda *_: pytest.fail("something was started"))
    with pytest.raises(OperatorError, match=rf"{providers[0]} and {providers[-1]} would both be `pdd {providers[0]}`"):
        run("--provider", *providers)


def test_each_size_is_measured_once(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--page-kib", "64", "4", "64", "--latency-kib", "4", "4", "--json"]
    assert run("--provider", "copy", *options) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=Report)
    assert [each.page_bytes for each in report.throughput] == [65536, 4096]
    assert len(report.latency) == 1


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "figure.png"
    assert run("--vs", "memcpy", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")
