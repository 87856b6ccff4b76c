"""Server-sent events: a stream of chunks to one client, no faster than the client reads.

Protocol: https://html.spec.whatwg.org/multipage/server-sent-events.html, of which OpenAI uses `data:` lines only.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from pdd.base.ids import RequestId
from pdd.http.faults import Fault

STALLED_CLIENT_S = 60.0
"""A client that takes nothing for this long is dropped."""


class ClientGone(Exception):
    """Nobody reads the answer any more."""


class EventStream:
    """Every method but `__init__` raises ClientGone."""

    def __init__(self, request: web.Request, request_id: RequestId) -> None:
        self._request = request
        self._encoder = msgspec.json.Encoder()
        self.response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-cache",
                "X-Accel-Buffering": "no",  # or nginx would collect the whole answer first
                "x-request-id": request_id,
            }
        )

    async def open(self) -> None:
        """Sends the headers: from here on an error can only be an event."""
        try:
            await self.response.prepare(self._request)
        except ConnectionError as error:
            raise ClientGone from error

    async def send(self, *chunks: msgspec.Struct) -> None:
        """One event for each chunk; returns when the client is not too far behind."""
        await self._write(b"".join(b"data: " + self._encoder.encode(chunk) + b"\n\n" for chunk in chunks))

    async def done(self) -> None:
        await self._write(b"data: [DONE]\n\n")
        await self._end()

    async def fail(self, fault: Fault) -> None:
        """The last event of a stream that has no [DONE]."""
        await self._write(b"data: " + fault.body() + b"\n\n")
        await self._end()

    async def _write(self, data: bytes) -> None:
        if not data:
            return
        try:
            async with asyncio.timeout(STALLED_CLIENT_S):
                await self.response.write(data)
        except TimeoutError as error:
            if self._request.transport is not None:
                self._request.transport.abort()
            raise ClientGone from error
        except ConnectionError as error:
            raise ClientGone from error

    async def _end(self) -> None:
        try:
            await self.response.write_eof()
        except ConnectionError as error:
            raise ClientGone from error
