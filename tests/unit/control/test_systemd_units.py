"""The units hold what the daemon relies on; a typo in a unit is only a line in a journal elsewhere."""

from __future__ import annotations

from pathlib import Path

from pdd.topology.model import Limits

UNITS = Path(__file__).parents[3] / "systemd"


def settings(name: str) -> dict[tuple[str, str], list[str]]:
    """(section, key) to its values, in order: systemd allows a key many times."""
    found: dict[tuple[str, str], list[str]] = {}
    section = ""
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, equals, value = line.partition("=")
            assert equals, f"{name}: {line!r} is no setting"
            assert section, f"{name}: {line!r} stands before any section"
            found.setdefault((section, key), []).append(value)
    return found


def test_the_daemon_s_unit() -> None:
    unit = settings("pdd@.service")
    expected = {
        "Type": "notify",
        "NotifyAccess": "main",
        "LimitMEMLOCK": "infinity",
        "KillMode": "mixed",
        "Restart": "on-failure",
        "RuntimeDirectory": "pdd",
        "RuntimeDirectoryMode": "0700",
    }
    for key, value in expected.items():
        assert unit["Service", key] == [value]
    assert unit["Service", "ExecStart"][0].endswith("daemon --topology /etc/pdd/topology.yaml --node %i")
    assert int(unit["Service", "WatchdogSec"][0]) > 0
    assert "4" in unit["Service", "RestartPreventExitStatus"][0].split()
    assert unit["Unit", "PartOf"] == unit["Install", "WantedBy"] == ["pdd.target"]


def test_stopping_takes_longer_than_a_drain() -> None:
    assert int(settings("pdd@.service")["Service", "TimeoutStopSec"][0]) > Limits().drain_s


def test_hardening_leaves_what_the_fabric_needs() -> None:
    unit = settings("pdd@.service")
    assert {"AF_UNIX", "AF_INET", "AF_INET6"} <= set(unit["Service", "RestrictAddressFamilies"][0].split())
    for key in ("PrivateDevices", "PrivateIPC", "MemoryDenyWriteExecute", "PrivateNetwork"):
        assert ("Service", key) not in unit


def test_every_setting_of_the_daemon_has_its_reason() -> None:
    """A comment stands above each group of settings, so that nobody has to guess why a line is there."""
    previous = ""
    for line in (UNITS / "pdd@.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            assert previous, f"{line!r} begins a group without a reason"
        previous = line


def test_the_target() -> None:
    assert settings("pdd.target")["Install", "WantedBy"] == ["multi-user.target"]
