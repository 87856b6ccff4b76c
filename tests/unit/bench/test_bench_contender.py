"""The processes of a contender: stopped between turns, checked after each round, left out when not installed."""

import contextlib
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pdd.base.ids import Immediate
from pdd.bench.contender import PEERS, Contender, ContenderFailed, ContenderMissing, Running
from pdd.bench.peers import ours
from pdd.bench.peers.pair import Arena, Round, check, stamp
from pdd.fabric.port import CountReached

KIB, MIB = 1 << 10, 1 << 20
PYTHON = Path(sys.executable)
FAKE_ENGINE = '''
"""Mooncake's engine as far as the bench uses it: it writes into the other process through /proc."""
import ctypes, os

class TransferEngine:
    def initialize(self, host, metadata, protocol, device):
        assert (host, metadata, protocol, device) == ("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1).value, 0, 0, 0)  # PR_SET_PTRACER: any
        return 0

    def register_memory(self, address, num_bytes):
        return 0

    def get_rpc_port(self):
        return os.getpid()

    def batch_transfer_sync_write(self, peer, here, there, lengths):
        memory = os.open(f"/proc/{peer.split(':')[1]}/mem", os.O_WRONLY)
        for source, target, length in list(zip(here, there, lengths))[LOST:]:
            os.pwrite(memory, ctypes.string_at(source, length), target)
        os.close(memory)
        return FAILS
'''
FakeMooncake = Callable[..., Contender]


@pytest.fixture
def fake_mooncake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeMooncake:
    """Installs a package where the peer's interpreter looks: one that loses pages, or says that it fails, if asked."""

    def install(lost: int = 0, fails: int = 0) -> Contender:
        package = tmp_path / "mooncake"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "engine.py").write_text(FAKE_ENGINE.replace("LOST", str(lost)).replace("FAILS", str(fails)))
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return PEERS["mooncake"][0]

    return install


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]


def test_an_optional_package_moves_every_page_from_another_interpreter(fake_mooncake: FakeMooncake) -> None:
    running = Running(fake_mooncake(), PYTHON, MIB)
    try:
        assert running.version.startswith("Mooncake")
        assert len(running.turn(4 * KIB, 256, 2)) == 2
        assert len(running.turn(64 * KIB, 16, 1)) == 1
        assert len(running.turn(4 * KIB, 1, 5)) == 5
    finally:
        running.close()


def test_a_peer_that_loses_a_page_has_not_moved_them_all(fake_mooncake: FakeMooncake) -> None:
    running = Running(fake_mooncake(lost=1), PYTHON, MIB)
    try:
        with pytest.raises(ContenderFailed, match="1 of 16 pages of 65536 bytes were not there"):
            running.turn(64 * KIB, 16, 1)
    finally:
        running.close()


def test_a_source_that_fails_ends_the_contender(fake_mooncake: FakeMooncake) -> None:
    running = Running(fake_mooncake(fails=1), PYTHON, MIB)
    try:
        with pytest.raises(ContenderFailed, match="RuntimeError: Mooncake's batch failed"):
            running.turn(64 * KIB, 16, 1)
        with pytest.raises(ContenderFailed, match="it has ended"):
            running.turn(64 * KIB, 16, 1)
    finally:
        running.close()
        running.close()


def test_what_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "nixl.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(ContenderMissing, match=r"nixl._api.*is nixl installed for"):
        Running(PEERS["nixl"][0], PYTHON, MIB)


def test_an_interpreter_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ContenderMissing, match="nowhere does not start: No such file"):
        Running(PEERS["memcpy"][0], tmp_path / "nowhere", MIB)


def test_a_contender_that_cannot_open_says_why() -> None:
    contender = Contender(name="pdd none", route=PEERS["memcpy"][0].route, module="ours", variant="no-such-provider")
    with pytest.raises(ContenderMissing, match=r"FabricUnavailable.*no-such-provider"):
        Running(contender, PYTHON, MIB)


def test_pages_over_the_nic_do_not_pass_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    class FakeEnd:
        """Its port counts all pages of a round at once, and has copied so many bytes."""

        name, arena = "copy", Arena(64 * KIB)
        copied_bytes = 0

        def __init__(self, variant: str, arena_bytes: int, line: object) -> None:
            self.port, self._bell = self, os.eventfd(0)

        def fileno(self) -> int:
            return self._bell

        def expect(self, immediate: Immediate, count: int) -> None:
            os.eventfd_write(self._bell, 1)

        def events(self) -> list[CountReached]:
            os.eventfd_read(self._bell)
            return [CountReached(Immediate(1), first_s=1.0, last_s=2.0)]

        def statistics(self) -> dict[str, int]:
            return {"num_copied_bytes": self.copied_bytes}

        def close(self) -> None:
            os.close(self._bell)

    monkeypatch.setattr(ours, "End", FakeEnd)
    with contextlib.closing(ours.Target("copy", 64 * KIB, None)) as target:  # type: ignore[arg-type]
        for number, copied_bytes in enumerate((0, 0, 4 * KIB)):  # the first round may take the NIC
            FakeEnd.copied_bytes = copied_bytes
            target.prepare(Round(number, 4 * KIB, 16), range(16))
            assert target.wait().end_s == 2.0
        with pytest.raises(RuntimeError, match="over the NIC instead of being copied"):
            target.prepare(Round(3, 4 * KIB, 16), range(16))


def test_both_processes_stand_still_between_turns_and_are_gone_at_the_end() -> None:
    running = Running(PEERS["tcp"][0], PYTHON, MIB)
    target = running._process.pid
    source = int(Path(f"/proc/{target}/task/{target}/children").read_text())
    source_fd = os.pidfd_open(source)
    os.waitid(os.P_PID, target, os.WSTOPPED | os.WNOWAIT)
    assert state(target) == "T"
    assert len(running.turn(4 * KIB, 16, 1)) == 1
    running.close()
    assert not Path(f"/proc/{target}").exists()
    assert select.select([source_fd], [], [], 10.0)[0], "the source has not ended"
    os.close(source_fd)


def test_a_round_s_check_finds_a_page_in_the_wrong_place_and_half_a_page() -> None:
    arena, job = Arena(64 * KIB), Round(3, 4 * KIB, 16)
    stamp(arena.view, job)
    check(arena.view, job, range(16))
    with pytest.raises(RuntimeError, match="2 of 16 pages"):
        check(arena.view, job, [1, 0, *range(2, 16)])
    arena.page(5, 4 * KIB)[-1] ^= 1
    with pytest.raises(RuntimeError, match="1 of 16 pages"):
        check(arena.view, job, range(16))


def test_a_round_s_target_is_a_permutation_that_both_sides_know() -> None:
    job = Round(7, 4 * KIB, 64)
    assert job.target_pages() == job.target_pages() != Round(8, 4 * KIB, 64).target_pages()
    assert sorted(job.target_pages()) == list(range(64))
