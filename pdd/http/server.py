"""The HTTP floor of one daemon: the OpenAI API over a Generator, and the pages that operators watch.

A request is read and checked (requests, plan), its sequences run (sequences), and their tokens become text and bodies
(choice, answer). Until the first output is there nothing has been written, so that every error has its own status.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, suppress
from functools import partial
from typing import TypeVar

import msgspec
from aiohttp import web

from pdd.base.errors import (
    AddressBusy,
    BadRequest,
    DeadlineExceeded,
    OperatorError,
    RequestTooLarge,
    UnsupportedMediaType,
)
from pdd.http.answer import StreamedAnswer, WholeAnswer
from pdd.http.connections import Connections
from pdd.http.events import ClientGone, EventStream
from pdd.http.faults import Fault, fault_of
from pdd.http.keys import ApiKeys, read_keys
from pdd.http.metrics import CLIENT_CLOSED, HttpMetrics
from pdd.http.plan import Plan, ServedModel, plan_chat, plan_completion
from pdd.http.port import Generator
from pdd.http.prompts import chat_prompt, check_token_ids
from pdd.http.requests import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody, read_body, read_object
from pdd.http.sequences import Sequences
from pdd.lifecycle.request import TokenOutput
from pdd.topology.model import Http, Limits
from pdd.wire.tls import HttpsTls

OPEN_PATHS = frozenset({"/live", "/ready", "/metrics"})
"""What needs no API key: probes and scrapers have none."""
READ_BODY_S = 60.0
"""How long a client may take to send a request's body."""
SHUTDOWN_S = 5.0
"""How long running answers may go on after stop()."""

Result = TypeVar("Result")
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Item = tuple[int, TokenOutput]
Outputs = AsyncGenerator[Item, None]


class HttpServer:
    """Serves one model. Raises KeyFileInvalid or CertificateInvalid when a file that the topology names is no good."""

    def __init__(self, generator: Generator, model: ServedModel, *, http: Http, limits: Limits) -> None:
        self._generator = generator
        self._model = model
        self._http = http
        self._limits = limits
        self._keys = None if http.api_key_file is None else ApiKeys(read_keys(http.api_key_file))
        self._metrics = HttpMetrics()
        self._started_s = int(time.time())
        # Tokenizing a long prompt takes a good part of a second, which the event loop does not have.
        self._threads = ThreadPoolExecutor(max_workers=2, thread_name_prefix="tokenize")
        self._app = web.Application(client_max_size=limits.max_body_bytes, middlewares=[self._guard])
        self._app.add_routes(self._routes())
        self._runner = web.AppRunner(
            self._app,
            handler_cancellation=True,  # a client that goes away cancels, also before the first token
            shutdown_timeout=SHUTDOWN_S,
        )
        self._tls = None if http.tls is None else HttpsTls(http.tls)
        self._connections: Connections | None = None

    async def start(self) -> None:
        """Listens. Raises AddressBusy when another process has the port, OperatorError for other faults of it."""
        await self._runner.setup()
        assert self._runner.server is not None
        self._connections = Connections(self._runner.server, self._tls, self._limits, self._metrics)
        where = f"{self._http.host}:{self._http.port}"
        try:
            await self._connections.listen(self._http.host, self._http.port)
        except OSError as error:
            await self.stop()
            if error.errno == errno.EADDRINUSE:
                raise AddressBusy(f"HTTP cannot listen on {where}: another process has it") from error
            raise OperatorError(f"HTTP cannot listen on {where}: {error}") from error

    async def stop(self) -> None:
        """Stops listening, gives running answers SHUTDOWN_S, then cancels them."""
        if self._connections is not None:
            await self._connections.stop_listening()
        await self._runner.cleanup()
        if self._connections is not None:
            await self._connections.closed()
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def port(self) -> int:
        """The port that is listened on: the system's choice where the topology says 0."""
        assert self._connections is not None
        return self._connections.port

    def _routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self._list_models),
            web.get("/v1/models/{model:.+}", self._show_model),
            web.post("/v1/chat/completions", expect_handler=self._expect, handler=self._chat),
            web.post("/v1/completions", expect_handler=self._expect, handler=self._complete),
            web.post("/tokenize", expect_handler=self._expect, handler=self._tokenize),
            web.post("/detokenize", expect_handler=self._expect, handler=self._detokenize),
            web.get("/live", self._live),
            web.get("/ready", self._ready),
            web.get("/health", self._health),
            web.get("/metrics", self._show_metrics),
        ]

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Asks for the key, turns every error into the API's shape, and counts."""
        try:
            if self._keys is not None and request.path not in OPEN_PATHS:
                self._keys.check(request.headers.get("Authorization"))
            response = await handler(request)
        except asyncio.CancelledError:
            self._metrics.count(request, CLIENT_CLOSED)
            raise
        except Exception as error:
            response = fault_of(error).response()
        self._metrics.count(request, response.status)
        return response

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await self._read_fields(request), ChatBody)
        self._model.check_name(body.model)
        return await self._answer(request, await self._in_thread(partial(plan_chat, body, self._model)))

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = read_body(await self._read_fields(request), CompletionBody)
        self._model.check_name(body.model)
        return await self._answer(request, await self._in_thread(partial(plan_completion, body, self._model)))

    async def _answer(self, request: web.Request, plan: Plan) -> web.StreamResponse:
        sequences = Sequences(self._generator, plan.prompts)
        async with aclosing(sequences.outputs()) as outputs:
            if not plan.stream:
                return await self._collect(plan, sequences, outputs)
            first = await anext(outputs)  # an error up to here has a status of its own
            events = EventStream(request, plan.id)
            with suppress(ClientGone):
                await events.open()
                await self._stream(plan, sequences, first, outputs, events)
            return events.response

    async def _collect(self, plan: Plan, sequences: Sequences, outputs: Outputs) -> web.Response:
        answer = WholeAnswer(plan, self._model, int(time.time()))
        async for index, output in outputs:
            answer.add(index, output)
            if answer.stopped(index) and not output.last:
                sequences.stop(index)
        return _json(answer.completion(), headers={"x-request-id": plan.id})

    async def _stream(
        self, plan: Plan, sequences: Sequences, first: Item, outputs: Outputs, events: EventStream
    ) -> None:
        """Raises ClientGone; every other error becomes the last event."""
        answer = StreamedAnswer(plan, self._model, int(time.time()))
        item: Item | None = first
        try:
            while item is not None:
                index, output = item
                sequences.shown(index)
                chunks = answer.chunks(index, output)
                if answer.stopped(index) and not output.last:
                    sequences.stop(index)
                await events.send(*chunks)
                item = await anext(outputs, None)
            await events.send(*answer.closing())
            await events.done()
        except ClientGone:
            raise
        except Exception as error:
            fault = fault_of(error)
            self._metrics.http_broken_streams.labels(fault.code).inc()
            await events.fail(fault)

    async def _tokenize(self, request: web.Request) -> web.Response:
        fields = await self._read_fields(request)
        if "messages" in fields:
            chat = read_body(fields, ChatBody)
            self._model.check_name(chat.model)
            tokens = list((await self._in_thread(partial(chat_prompt, chat, self._model.text))).tokens)
        else:
            body = read_body(fields, TokenizeBody)
            self._model.check_name(body.model or self._model.name)
            tokens = await self._in_thread(partial(self._encode, body))
        return _json({"count": len(tokens), "max_model_len": self._model.max_sequence_tokens, "tokens": tokens})

    def _encode(self, body: TokenizeBody) -> list[int]:
        self._model.check_size(body.prompt, "prompt")
        return self._model.text.encode(body.prompt, add_special_tokens=body.add_special_tokens is not False)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = read_body(await self._read_fields(request), DetokenizeBody)
        self._model.check_name(body.model or self._model.name)
        vocabulary = self._model.text.vocabulary
        check_token_ids(body.tokens, "tokens", vocabulary)
        return _json({"prompt": await self._in_thread(partial(vocabulary.decode, body.tokens))})

    async def _list_models(self, request: web.Request) -> web.Response:
        return _json({"object": "list", "data": [self._card()]})

    async def _show_model(self, request: web.Request) -> web.Response:
        self._model.check_name(request.match_info["model"])
        return _json(self._card())

    def _card(self) -> dict[str, object]:
        return {
            "id": self._model.name,
            "object": "model",
            "created": self._started_s,
            "owned_by": "pdd",
            "max_model_len": self._model.max_sequence_tokens,
        }

    async def _live(self, request: web.Request) -> web.Response:
        return _json({"live": True})

    async def _ready(self, request: web.Request) -> web.Response:
        readiness = self._generator.readiness()
        return _json(readiness, status=200 if readiness.ready else 503)

    async def _health(self, request: web.Request) -> web.Response:
        return _json(self._generator.health())

    async def _show_metrics(self, request: web.Request) -> web.Response:
        headers = {"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
        return web.Response(body=self._generator.metrics_text() + self._metrics.text(), headers=headers)

    async def _read_fields(self, request: web.Request) -> dict[str, object]:
        """The JSON object in the body."""
        self._check_head(request)
        try:
            async with asyncio.timeout(READ_BODY_S):
                raw = await request.read()
        except TimeoutError:
            raise DeadlineExceeded(f"The body of your request did not arrive within {READ_BODY_S:g} s.") from None
        except (web.RequestPayloadError, ConnectionError) as error:
            raise BadRequest(f"The body of your request broke off: {error}.") from error
        return read_object(raw)

    def _check_head(self, request: web.Request) -> None:
        """What can be refused before the body comes. Its type must be said, because web pages of others can send any
        other type here."""
        if request.content_type != "application/json":
            raise UnsupportedMediaType(
                "The body of a request must be JSON, with the header Content-Type: application/json."
            )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise UnsupportedMediaType("The body of a request must not be compressed: leave Content-Encoding out.")
        most, length = self._limits.max_body_bytes, request.content_length
        if length is not None and length > most:
            raise RequestTooLarge(f"The request's body is too large: {length} bytes, at most {most} are taken.")

    async def _expect(self, request: web.Request) -> web.Response | None:
        """A client that asks before it sends the body is told at once."""
        if request.headers["Expect"].lower() != "100-continue":
            return Fault(
                status=417,
                message="Expect: 100-continue is all that may be expected.",
                code="invalid_request_error",
                retryable=False,
            ).response()
        try:
            self._check_head(request)
        except BadRequest as error:
            return fault_of(error).response()
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0  # the answer has not begun
        return None

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _json(value: object, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    body = msgspec.json.encode(value)
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")
