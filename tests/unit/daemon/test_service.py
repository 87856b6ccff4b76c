"""What systemd hears."""

from __future__ import annotations

import socket
from pathlib import Path

from pdd.daemon.service import Notifier


def test_datagrams_say_ready_alive_and_stopping(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "30000000"})
        assert notifier.watchdog_s == 30.0
        notifier.ready("serving")
        notifier.alive()
        notifier.status("draining")
        notifier.stopping(2.5)
        heard = [systemd.recv(1000) for _ in range(4)]
    ready, *rest = heard
    assert ready == b"READY=1\nSTATUS=serving"
    assert rest == [b"WATCHDOG=1", b"STATUS=draining", b"STOPPING=1\nEXTEND_TIMEOUT_USEC=2500000"]


def test_without_systemd_nothing_is_said_and_a_dead_socket_does_no_harm(tmp_path: Path) -> None:
    Notifier({}).ready("serving")
    Notifier({"NOTIFY_SOCKET": str(tmp_path / "nobody")}).alive()
