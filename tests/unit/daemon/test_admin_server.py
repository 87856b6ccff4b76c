"""The admin socket: its mode, its answers to good and bad lines, and whose socket it replaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pdd.base.errors import AddressBusy, InvariantBroken, NotFound
from pdd.daemon.admin import AdminServer
from pdd.wire.admin import AdminRequest, DrainResult


async def answer(request: AdminRequest) -> msgspec.Struct:
    if request.command == "missing":
        raise NotFound("no such request")
    if request.command == "bug":
        raise InvariantBroken("a bug")
    return DrainResult(draining=True, unfinished=3)


def nobody() -> None:
    raise AssertionError("a process of our own was refused")


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "run" / "node0.sock"
    server = AdminServer(path, answer, nobody)
    await server.start()
    yield path
    await server.stop()
    assert not path.exists()


async def ask(path: Path, *lines: bytes) -> list[Any]:
    reader, writer = await asyncio.open_unix_connection(path)
    replies = []
    for line in lines:
        writer.write(line + b"\n")
        replies.append(json.loads(await reader.readline()))
    writer.close()
    await writer.wait_closed()
    return replies


async def test_only_the_owner_may_connect(path: Path) -> None:
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


async def test_one_connection_carries_many_questions_and_survives_bad_ones(path: Path) -> None:
    good = b'{"command": "drain"}'
    bad = (b"\xff\x00 no json", b'{"command": "x", "unknown": 1}', b'{"command": "missing"}')
    replies = await ask(path, good, *bad, good)
    assert replies[0] == replies[-1] == {"result": {"draining": True, "unfinished": 3}, "error": None}
    assert [reply["error"]["code"] for reply in replies[1:4]] == ["bad_request", "bad_request", "not_found"]


async def test_a_bug_is_answered_not_swallowed(path: Path) -> None:
    (reply,) = await ask(path, b'{"command": "bug"}')
    assert reply["error"] == {"code": "internal_error", "message": "a bug"}


async def test_an_endless_line_ends_the_connection_and_nothing_else(path: Path) -> None:
    reader, writer = await asyncio.open_unix_connection(path)
    writer.write(b"x" * 1_000_000)
    with contextlib.suppress(ConnectionResetError):  # what we had not sent yet may be refused
        assert await reader.read() == b""
    writer.close()
    assert (await ask(path, b'{"command": "drain"}'))[0]["error"] is None


async def test_a_living_daemon_keeps_its_socket_and_a_dead_one_loses_it(path: Path, tmp_path: Path) -> None:
    with pytest.raises(AddressBusy, match="another daemon"):
        await AdminServer(path, answer, nobody).start()
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    server = AdminServer(dead, answer, nobody)
    await server.start()
    assert (await ask(dead, b'{"command": "drain"}'))[0]["error"] is None
    await server.stop()


async def test_only_the_uids_that_may_are_answered(tmp_path: Path) -> None:
    refused: list[None] = []
    server = AdminServer(tmp_path / "a.sock", answer, lambda: refused.append(None), uids=(os.geteuid() + 1,))
    await server.start()
    for _ in range(2):
        reader, writer = await asyncio.open_unix_connection(tmp_path / "a.sock")
        writer.write(b'{"command": "drain"}\n')
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    assert len(refused) == 2
    await server.stop()


ASK = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect(sys.argv[1])
    try:
        sock.sendall(b'{"command": "drain"}\\n')
        answer = sock.recv(1000)
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
    sys.exit(bool(answer))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run a process of another user")
async def test_a_process_of_another_user_is_refused_even_where_modes_let_it_in() -> None:
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        path = Path(name) / "a.sock"
        refused: list[None] = []
        server = AdminServer(path, answer, lambda: refused.append(None))
        await server.start()
        path.chmod(0o666)
        command = [sys.executable, "-S", "-c", ASK, str(path)]
        asked = await asyncio.to_thread(subprocess.run, command, check=False)
        assert asked.returncode == 0
        assert len(refused) == 1
        await server.stop()
