"""Hostile bytes on the HTTP port: whatever comes, the connection ends and the next client is served."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from http_fakes import FakeGenerator, chat_text, outputs_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pdd.http.plan import ServedModel
from pdd.http.server import HttpServer
from pdd.topology.model import Http, Limits

BODY = b'{"model": "m", "prompt": "x", "max_tokens": 2}'
words = st.sampled_from(
    [b"GET", b"POST", b"PRI", b"/live", b"/v1/completions", b"*", b"HTTP/1.1", b"HTTP/1.0", b"HTTP/2.0", b" ", b"\r\n",
     b"\n", b"\r\n\r\n", b"Host: x", b"Content-Type: application/json", b"Content-Length: 46", b"Content-Length: 9" * 9,
     b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked", b"Connection: upgrade", b"Upgrade: websocket",
     b"Expect: 100-continue", b"Connection: close", b"Content-Encoding: gzip", b":", b"5\r\nhello\r\n0\r\n\r\n",
     b"ffffffffffffffff\r\n", BODY, b"[" * 5000, b'{"model": "m", "prompt": [[1]], "n": 3, "stream": true}']
)  # fmt: skip
heads = st.lists(words, max_size=14).map(b"".join)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
posts = st.binary(max_size=80).map(lambda body: POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)


class Served:
    """A server, and an event loop that lives as long as the examples."""

    def __init__(self, runner: asyncio.Runner) -> None:
        text = chat_text()
        model = ServedModel(name="m", text=text, max_sequence_tokens=64)
        tokens = [*text.vocabulary.encode("the fox"), *text.config.eos_token_ids]
        generator = FakeGenerator(lambda request: outputs_of(request, tokens))
        self.server = HttpServer(generator, model, http=Http(port=0), limits=Limits(header_s=0.2, max_connections=8))
        self.runner = runner

    async def attack(self, data: bytes, step: int) -> None:
        """Ends with the server's end of the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        with contextlib.suppress(OSError):
            for start in range(0, len(data), step):
                if not writer.is_closing():
                    writer.write(data[start : start + step])
                await asyncio.sleep(0)
            writer.write_eof()
            await reader.read()
        writer.close()

    async def ask(self) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        writer.write(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY)
        answer = await reader.read()
        writer.close()
        return answer


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with asyncio.Runner() as runner:
        served = Served(runner)
        runner.run(served.server.start())
        yield served
        runner.run(served.server.stop())


@settings(
    max_examples=60,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
@given(data=st.lists(heads | posts | st.binary(max_size=200), max_size=4).map(b"".join), step=st.integers(10, 500))
def test_anything_on_the_http_port(served: Served, data: bytes, step: int) -> None:
    async def attack() -> None:
        attacking = asyncio.create_task(served.attack(data, step))
        assert (await served.ask()).startswith(b"HTTP/1.1 200")
        await attacking

    served.runner.run(attack())
