"""Clients that open too much, say too little, or say what no HTTP client says; and HTTP over TLS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
import uvloop
from certificates import make_authority, make_certificate, make_self_signed
from conftest import Serve
from http_fakes import FakeGenerator, chat_text, outputs_of

from pdd.base.errors import CertificateInvalid
from pdd.http.plan import ServedModel
from pdd.http.server import HttpServer
from pdd.lifecycle.request import GenerateRequest
from pdd.topology.model import Certificate, Http, Limits
from pdd.wire.tls import pinned_context

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
GET = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"


@asynccontextmanager
async def connection(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    yield reader, writer
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """What comes until the server closes, however it does."""
    with contextlib.suppress(ConnectionError):
        return await reader.read()
    return b""


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], Any]:
    status = int((await reader.readline()).split()[1])
    headers = {}
    while line := (await reader.readline()).strip():
        name, _, value = line.decode().partition(": ")
        headers[name] = value
    return status, headers, json.loads(await reader.readexactly(int(headers["Content-Length"])))


async def metric(url: str, line: str, **how: Any) -> None:
    """Waits until the metrics have the line."""
    async with aiohttp.ClientSession() as client, asyncio.timeout(20):
        while True:
            async with client.get(f"{url}/metrics", **how) as response:
                text = await response.text()
            if line in text.splitlines():
                return


# ---- slow clients ----


@pytest.mark.parametrize("said", [b"", b"G", GET[:-2], POST + b"X-More: "])
async def test_a_head_that_does_not_end_is_cut(serve: Serve, said: bytes) -> None:
    served = await serve(limits=Limits(header_s=0.05))
    async with connection(served.server.port) as (reader, writer):
        writer.write(said)
        assert await until_closed(reader) == b""


async def test_a_head_that_comes_byte_by_byte_is_cut(serve: Serve) -> None:
    served = await serve(limits=Limits(header_s=0.05))
    async with connection(served.server.port) as (reader, writer):
        writer.write(POST)

        async def drip() -> None:
            while not writer.is_closing():
                writer.write(b"X-A: b\r\n"[:1])
                await asyncio.sleep(0.002)

        dripping = asyncio.create_task(drip())
        assert await until_closed(reader) == b""
        dripping.cancel()


async def test_the_second_head_has_its_time_too_and_an_idle_client_is_sent_away(serve: Serve) -> None:
    served = await serve(limits=Limits(header_s=0.05))
    for second in (b"", b"GET /li"):
        async with connection(served.server.port) as (reader, writer):
            writer.write(GET + second)
            assert (await answer(reader))[0] == 200
            assert await until_closed(reader) == b""


async def test_an_answer_may_take_longer_than_a_head(serve: Serve) -> None:
    released = asyncio.Event()

    def script(request: GenerateRequest) -> Any:
        yield released
        yield from outputs_of(request, [300, 301])

    served = await serve(script, limits=Limits(header_s=0.05))
    asked = asyncio.create_task(served.complete(max_tokens=2))
    for _ in range(3):
        async with connection(served.server.port) as (reader, _writer):
            await until_closed(reader)  # header_s has passed
    released.set()
    assert (await asked)[0] == 200


async def test_a_client_that_acknowledges_nothing_is_left_to_the_kernel(serve: Serve) -> None:
    served = await serve()
    await served.client.get("/live")
    (handler,) = served.server._runner.server.connections  # type: ignore[union-attr]
    sock = handler.transport.get_extra_info("socket")  # type: ignore[union-attr]
    assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000


# ---- many clients ----


async def test_connections_beyond_the_limit_are_closed_and_counted(serve: Serve) -> None:
    served = await serve(limits=Limits(max_connections=2))
    async with connection(served.server.port) as (first, first_writer):
        async with connection(served.server.port) as (second, second_writer):
            for reader, writer in ((first, first_writer), (second, second_writer)):
                writer.write(GET)
                assert (await answer(reader))[0] == 200
            async with connection(served.server.port) as (third, third_writer):
                third_writer.write(GET)
                assert await until_closed(third) == b""
            second_writer.write(GET)
            assert (await answer(second))[0] == 200, "those that are open stay"
        first_writer.write(GET.replace(b"/live", b"/metrics"))
        await first.readuntil(b'pdd:http_refused_connections_total{why="too many"} 1.0\n')
    async with asyncio.timeout(20):
        while (await attempt(served.server.port)) != 200:
            pass  # the server has not noticed yet that there is room


async def attempt(port: int) -> int:
    """The status that one more client gets; 0 where it is sent away."""
    async with connection(port) as (reader, writer):
        with contextlib.suppress(OSError, IndexError):
            writer.write(GET)
            return (await answer(reader))[0]
    return 0


async def test_a_hundred_connections_that_say_nothing_leave_room_for_one_that_does(serve: Serve) -> None:
    served = await serve(limits=Limits(max_connections=50, header_s=0.05))
    silent = [await asyncio.open_connection("127.0.0.1", served.server.port) for _ in range(100)]
    for reader, writer in silent:
        await until_closed(reader)
        writer.close()
    assert (await served.complete())[0] == 200


# ---- what is no request ----


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /live HTTP/1.1\r\nHost: x\r\nBad Header: y\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nhello",
    ],
)
async def test_what_is_no_http_is_answered_in_the_api_s_shape_and_closed(serve: Serve, raw: bytes) -> None:
    served = await serve()
    async with connection(served.server.port) as (reader, writer):
        writer.write(raw)
        status, headers, body = await answer(reader)
        assert status == 400
        assert headers["Content-Type"].startswith("application/json")
        assert body["error"]["code"] == body["error"]["type"] == "invalid_request_error"
        assert len(body["error"]["message"]) < 400
        assert await until_closed(reader) == b""
    assert served.generator.requests == []


async def test_a_body_that_is_too_large_is_refused_before_it_comes(serve: Serve) -> None:
    served = await serve(limits=Limits(max_body_bytes=1000))
    for expect in (b"", b"Expect: 100-continue\r\n"):
        async with connection(served.server.port) as (reader, writer):
            writer.write(POST + expect + b"Content-Length: 1001\r\n\r\n")
            status, _, body = await answer(reader)
            assert (status, body["error"]["code"]) == (413, "request_too_large")


async def test_a_client_that_asks_first_is_told_to_go_on(serve: Serve) -> None:
    served = await serve()
    body = b'{"model": "m", "prompt": "x"}'
    async with connection(served.server.port) as (reader, writer):
        writer.write(POST + f"Expect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await answer(reader))[0] == 200
        writer.write(POST + b"Expect: miracles\r\nContent-Length: 2\r\n\r\n{}")
        assert (await answer(reader))[0] == 417


async def test_a_wrong_method_is_told_the_right_ones(serve: Serve) -> None:
    served = await serve()
    async with served.client.put("/live") as response:
        assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")


# ---- TLS ----


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    file = make_self_signed(tmp_path_factory.mktemp("https"), "server")
    return Certificate(certificate_file=file, key_file=file.with_suffix(".key"))


async def test_https(serve: Serve, certificate: Certificate) -> None:
    served = await serve(http=Http(port=0, tls=certificate))
    url = f"https://127.0.0.1:{served.server.port}"
    pinned = pinned_context(certificate.certificate_file)
    async with aiohttp.ClientSession(url) as client:
        for stream in (False, True):
            body = {"model": "m", "prompt": "x", "stream": stream}
            async with client.post("/v1/completions", json=body, ssl=pinned) as response:
                assert response.status == 200
                await response.read()
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await client.get("/live")  # a client that does not know it does not trust it
    async with connection(served.server.port) as (reader, writer):
        writer.write(GET)
        assert b"live" not in await until_closed(reader)
    await metric(url, 'pdd:http_refused_connections_total{why="tls"} 2.0', ssl=pinned)


async def test_a_certificate_that_is_replaced_is_that_of_the_next_connections(serve: Serve, tmp_path: Path) -> None:
    first, second = (make_self_signed(tmp_path, name) for name in ("first", "second"))
    own = Certificate(certificate_file=tmp_path / "own.crt", key_file=tmp_path / "own.key")

    def replace_with(made: Path) -> None:
        shutil.copy(made, own.certificate_file)
        shutil.copy(made.with_suffix(".key"), own.key_file)

    replace_with(first)
    served = await serve(http=Http(port=0, tls=own))
    url = f"https://127.0.0.1:{served.server.port}"
    async with aiohttp.ClientSession(url) as early:
        pinned = pinned_context(first)
        async with early.get("/live", ssl=pinned) as response:
            assert response.status == 200
        replace_with(second)
        async with early.get("/live", ssl=pinned) as response:
            assert response.status == 200, "a connection goes on as it began"
    own.key_file.write_text("nothing")
    for _ in range(2):
        async with aiohttp.ClientSession(url) as late:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await late.get("/live", ssl=pinned_context(second))
    replace_with(second)
    own.key_file.touch()
    async with aiohttp.ClientSession(url) as late, late.get("/live", ssl=pinned_context(second)) as response:
        assert response.status == 200


async def test_old_tls_is_refused(serve: Serve, certificate: Certificate) -> None:
    served = await serve(http=Http(port=0, tls=certificate))
    old = pinned_context(certificate.certificate_file)
    old.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        old.maximum_version = ssl.TLSVersion.TLSv1_1
    with pytest.raises((ssl.SSLError, ConnectionError)):
        await asyncio.open_connection("127.0.0.1", served.server.port, ssl=old)


async def test_tls_that_does_not_begin_counts_and_is_cut(serve: Serve, certificate: Certificate) -> None:
    limits = Limits(max_connections=2, header_s=0.05)
    served = await serve(http=Http(port=0, tls=certificate), limits=limits)
    silent = [await asyncio.open_connection("127.0.0.1", served.server.port) for _ in range(5)]
    for reader, writer in silent:
        await until_closed(reader)
        writer.close()
    pinned = pinned_context(certificate.certificate_file)
    url = f"https://127.0.0.1:{served.server.port}"
    await metric(url, 'pdd:http_refused_connections_total{why="too many"} 3.0', ssl=pinned)
    await metric(url, 'pdd:http_refused_connections_total{why="tls"} 2.0', ssl=pinned)


def test_stopping_does_not_wait_for_tls_that_does_not_begin(certificate: Certificate) -> None:
    for new_loop in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(serve_and_stop(certificate))


async def serve_and_stop(certificate: Certificate) -> None:
    text = chat_text()
    model = ServedModel(name="m", text=text, max_sequence_tokens=256)
    generator = FakeGenerator(lambda request: outputs_of(request, [300, 301]))
    server = HttpServer(generator, model, http=Http(port=0, tls=certificate), limits=Limits())
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    pinned = pinned_context(certificate.certificate_file)
    async with aiohttp.ClientSession(f"https://127.0.0.1:{server.port}") as client:
        async with client.get("/live", ssl=pinned) as response:
            assert response.status == 200
        (handler,) = server._runner.server.connections  # type: ignore[union-attr]
        sock = handler.transport.get_extra_info("socket")  # type: ignore[union-attr]
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "tokens go out one by one"
    await server.stop()
    assert await until_closed(reader) == b""
    writer.close()


Break = Callable[[Certificate, Path], Certificate]


def expired(files: Certificate, directory: Path) -> Certificate:
    made = make_certificate(directory, "expired", make_authority(directory), days="-1")
    return Certificate(certificate_file=made.certificate_file, key_file=made.key_file)


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda files, path: msgspec.structs.replace(files, certificate_file=path / "none"), "No such file"),
        (lambda files, path: msgspec.structs.replace(files, key_file=path / "none"), "No such file"),
        (expired, "expired"),
    ],
)
async def test_a_certificate_that_is_no_good_stops_the_server(
    serve: Serve, certificate: Certificate, tmp_path: Path, break_it: Break, words: str
) -> None:
    with pytest.raises(CertificateInvalid, match=words):
        await serve(http=Http(port=0, tls=break_it(certificate, tmp_path)))
