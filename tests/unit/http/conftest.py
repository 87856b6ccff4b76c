from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from http_fakes import FakeGenerator, Script, chat_text, outputs_of

from pdd.http.plan import ServedModel
from pdd.http.server import HttpServer
from pdd.http.text import Text
from pdd.topology.model import Http, Limits

MAX_SEQUENCE_TOKENS = 256


@pytest.fixture(scope="session")
def text() -> Text:
    return chat_text()


@dataclass
class Served:
    """A running server, its generator, and a client that speaks to it."""

    generator: FakeGenerator
    server: HttpServer
    client: aiohttp.ClientSession
    text: Text

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    async def post(self, path: str, **fields: Any) -> tuple[int, Any]:
        async with self.client.post(path, json={"model": "m", **fields}) as response:
            return response.status, await response.json()

    async def chat(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **fields})

    async def complete(self, **fields: Any) -> tuple[int, Any]:
        return await self.post("/v1/completions", **{"prompt": "hi", **fields})


Serve = Callable[..., Awaitable[Served]]


@pytest.fixture
async def serve(text: Text) -> AsyncIterator[Serve]:
    """Starts a server whose generator follows a script, or always answers a text and ends it with `<|im_end|>`."""
    running: list[Served] = []

    async def start(
        answer: str | Script = "the fox", *, http: Http | None = None, limits: Limits | None = None
    ) -> Served:
        script: Script
        if isinstance(answer, str):
            tokens = [*text.vocabulary.encode(answer), *text.config.eos_token_ids]
            script = lambda request: outputs_of(request, tokens)  # noqa: E731
        else:
            script = answer
        generator = FakeGenerator(script)
        model = ServedModel(name="m", text=text, max_sequence_tokens=MAX_SEQUENCE_TOKENS)
        server = HttpServer(generator, model, http=http or Http(port=0), limits=limits or Limits())
        await server.start()
        client = aiohttp.ClientSession(f"http://127.0.0.1:{server.port}")
        running.append(Served(generator, server, client, text))
        return running[-1]

    yield start
    for served in running:
        await served.client.close()
        await served.server.stop()
