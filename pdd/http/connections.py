"""TCP connections of HTTP clients, before and between requests: how many, how slow, over TLS or not.

A connection counts from the moment it is accepted, so that those which only open, or only begin TLS, are held to the
same limits as those which ask something. What cannot be read as HTTP gets an error in the API's shape all the same.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress

import structlog
from aiohttp import web

from pdd.http.faults import Fault, fault_of
from pdd.http.metrics import HttpMetrics
from pdd.topology.model import Limits
from pdd.wire.tls import HttpsTls

log = structlog.get_logger("pdd.http")

BACKLOG = 1024
UNREAD_S = 60.0
"""The kernel ends a connection whose client acknowledges nothing for this long while something waits for it."""
NO_DESCRIPTORS_S = 0.1
"""Pause after an accept that failed because the process or the system has none left."""


class Connection(web.RequestHandler):
    """aiohttp's protocol of one connection. `header_s` bounds the wait for the head of each request, idle or not:
    aiohttp's keep-alive timer runs until a head is complete, from the start and after each answer."""

    def __init__(self, server: web.Server, metrics: HttpMetrics, header_s: float) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            keepalive_timeout=header_s,
            auto_decompress=False,  # or a small body could grow beyond the limit while it is unpacked
            access_log=None,  # type: ignore[arg-type] # aiohttp's own runner passes None as well
        )
        self._metrics = metrics
        self.gone = asyncio.Event()

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self.gone.set()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp's parser refuses, and what no handler caught."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun: another one cannot")
        fault = _unreadable(status, message or "") if status < 500 else fault_of(_as_exception(exc))
        self._metrics.http_responses.labels("other", fault.status).inc()
        response = fault.response()
        response.force_close()
        return response


def _unreadable(status: int, message: str) -> Fault:
    detail = next(iter(message.splitlines()), "")[:200]  # the next lines quote what was sent
    return Fault(
        status=status,
        message=f"This is not a request that HTTP/1.1 allows, or its head is too large: {detail}",
        code="invalid_request_error",
        retryable=False,
    )


def _as_exception(exc: BaseException | None) -> Exception:
    return exc if isinstance(exc, Exception) else RuntimeError(f"no handler answered: {exc!r}")


class Connections:
    """Accepts clients for an aiohttp server. `tls`: None for HTTP in clear."""

    def __init__(self, server: web.Server, tls: HttpsTls | None, limits: Limits, metrics: HttpMetrics) -> None:
        self._server = server
        self._tls = tls
        self._limits = limits
        self._metrics = metrics
        self._listeners: list[socket.socket] = []
        self._accepting: list[asyncio.Task[None]] = []
        self._open: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """On every address of `host`. Raises OSError, and then listens on none."""
        loop = asyncio.get_running_loop()
        try:
            for family, _, _, _, address in await loop.getaddrinfo(
                host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
                listener.setblocking(False)
                self._listeners.append(listener)
        except OSError:
            self._close_listeners()
            raise
        self._accepting = [loop.create_task(self._accept(listener)) for listener in self._listeners]

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    async def stop_listening(self) -> None:
        """Open connections stay."""
        for task in self._accepting:
            task.cancel()
        await asyncio.gather(*self._accepting, return_exceptions=True)
        self._close_listeners()

    async def closed(self) -> None:
        """Once the server has ended its connections: those still in their TLS handshake end now."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is left, or the client was gone again
                log.warning("cannot accept a client", error=error.strerror)
                await asyncio.sleep(NO_DESCRIPTORS_S)
                continue
            if len(self._open) >= self._limits.max_connections:
                self._metrics.http_refused_connections.labels("too many").inc()
                accepted.close()
                continue
            task = loop.create_task(self._serve(accepted))
            self._open.add(task)
            self._metrics.http_connections.set(len(self._open))
            task.add_done_callback(self._ended)

    async def _serve(self, accepted: socket.socket) -> None:
        """One connection from here to its end."""
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(UNREAD_S * 1000))
        connection = Connection(self._server, self._metrics, self._limits.header_s)
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                accepted,
                ssl=self._tls.context() if self._tls else None,
                ssl_handshake_timeout=self._limits.header_s if self._tls else None,
            )
        except OSError:  # ssl.SSLError and time-outs of a handshake included
            self._metrics.http_refused_connections.labels("tls").inc()
            return
        await connection.gone.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        self._metrics.http_connections.set(len(self._open))
        with suppress(asyncio.CancelledError):
            if error := task.exception():
                log.error("a connection failed", exc_info=error)

    def _close_listeners(self) -> None:
        for listener in self._listeners:
            listener.close()
