"""The admin socket: one JSON request a line in, one JSON reply a line out (words in wire/admin.py)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Collection
from pathlib import Path

import msgspec
import structlog

from pdd.base.errors import AddressBusy, BadRequest, PddError
from pdd.wire.admin import AdminError, AdminReply, AdminRequest

log = structlog.get_logger(__name__)

_MAX_LINE_BYTES = 64 * 1024

Answer = Callable[[AdminRequest], Awaitable[msgspec.Struct]]
"""Performs a command; raises PddError for what the operator should read."""


class AdminServer:
    """Listens on a Unix socket of which the mode lets only its owner connect; whoever connects all the same (through a
    directory or a descriptor that was handed on) must be one of `uids`. `refused` hears of each that is not."""

    def __init__(
        self,
        path: Path,
        answer: Answer,
        refused: Callable[[], None],
        uids: Collection[int] = frozenset({0, os.geteuid()}),
    ) -> None:
        self._path = path
        self._answer = answer
        self._refused = refused
        self._uids = uids
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Raises AddressBusy when another daemon answers there; a dead one's socket is replaced."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._path.exists():
            if _answers(self._path):
                raise AddressBusy(f"{self._path}: another daemon of this node runs; stop it first")
            self._path.unlink()
        # The mode must be right before anyone can connect, so it cannot wait for a chmod after listen().
        previous = os.umask(0o177)
        try:
            self._server = await asyncio.start_unix_server(self._serve, path=self._path, limit=_MAX_LINE_BYTES)
        except OSError as error:
            raise AddressBusy(f"{self._path}: cannot listen: {error.strerror}") from error
        finally:
            os.umask(previous)

    async def stop(self) -> None:
        if self._server is None:
            return
        self._server.close()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            if (uid := _peer_uid(writer)) not in self._uids:
                log.warning("admin socket refused a process", uid=uid)
                self._refused()
                return
            while line := await reader.readline():
                writer.write(msgspec.json.encode(await self._reply(line)) + b"\n")
                await writer.drain()
        except (OSError, ValueError):  # gone, or a line longer than the limit: either way the talk is over
            pass
        except asyncio.CancelledError:
            pass
        finally:
            self._connections.discard(task)
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _reply(self, line: bytes) -> AdminReply:
        try:
            request = msgspec.json.decode(line, type=AdminRequest)
        except msgspec.MsgspecError as error:
            return AdminReply(error=AdminError(code="bad_request", message=f"not an admin request: {error}"))
        try:
            return AdminReply(result=await self._answer(request))
        except BadRequest as error:
            return AdminReply(error=AdminError(code="bad_request", message=str(error)))
        except PddError as error:
            return AdminReply(error=AdminError(code=error.code, message=str(error)))


_CREDENTIALS = struct.Struct("3i")
"""struct ucred of unix(7): pid, uid, gid, as they were when the peer connected."""


def _peer_uid(writer: asyncio.StreamWriter) -> int:
    sock: socket.socket = writer.get_extra_info("socket")
    _, uid, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
