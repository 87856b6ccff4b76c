"""The admin socket: its mode, its answers to good and bad lines, and whose socket it replaces."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import stat
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


@pytest.fixture
async def path(tmp_path: Path) -> AsyncIterator[Path]:
    path = tmp_path / "run" / "node0.sock"
    server = AdminServer(path, answer)
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
        await AdminServer(path, answer).start()
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(dead))
    server = AdminServer(dead, answer)
    await server.start()
    assert (await ask(dead, b'{"command": "drain"}'))[0]["error"] is None
    await server.stop()
