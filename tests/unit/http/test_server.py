"""The server around the API: keys, pages for operators, ports, and clients that go away or do not read."""

from __future__ import annotations

import asyncio
import json
import zlib
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve, Served
from http_fakes import outputs_of

from pdd.base.errors import AddressBusy, KeyFileInvalid
from pdd.lifecycle.request import GenerateRequest, Readiness, TokenOutput
from pdd.topology.model import Http

POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def keyed(path: Path, text: str = "# ops\nkey-one\n\nkey-two\n", mode: int = 0o600) -> Http:
    path.write_text(text)
    path.chmod(mode)
    return Http(port=0, api_key_file=path)


@pytest.mark.parametrize(
    ("header", "status"),
    [
        (None, 401),
        ("Bearer wrong", 401),
        ("Bearer", 401),
        ("Basic key-one", 401),
        ("Bearer # ops", 401),
        ("Bearer key-one", 200),
        ("bearer key-two", 200),
    ],
)
async def test_api_keys(serve: Serve, tmp_path: Path, header: str | None, status: int) -> None:
    served = await serve(http=keyed(tmp_path / "keys"))
    headers = {} if header is None else {"Authorization": header}
    async with served.client.get("/v1/models", headers=headers) as response:
        assert response.status == status
        if status == 401:
            assert (await response.json())["error"]["code"] == "invalid_api_key"


@pytest.mark.parametrize("path", ["/live", "/ready", "/metrics"])
async def test_probes_need_no_key(serve: Serve, tmp_path: Path, path: str) -> None:
    served = await serve(http=keyed(tmp_path / "keys"))
    async with served.client.get(path) as response:
        assert response.status == 200


@pytest.mark.parametrize(("content", "mode"), [("", 0o600), ("# none\n", 0o600), ("key\n", 0o640)])
async def test_a_bad_key_file_stops_the_server(serve: Serve, tmp_path: Path, content: str, mode: int) -> None:
    with pytest.raises(KeyFileInvalid):
        await serve(http=keyed(tmp_path / "keys", content, mode))


async def test_a_missing_key_file_stops_the_server(serve: Serve, tmp_path: Path) -> None:
    with pytest.raises(KeyFileInvalid, match="cannot be read"):
        await serve(http=Http(port=0, api_key_file=tmp_path / "none"))


async def test_a_port_that_is_taken(serve: Serve) -> None:
    served = await serve()
    with pytest.raises(AddressBusy, match=str(served.server.port)):
        await serve(http=Http(port=served.server.port))


async def test_pages_for_operators(serve: Serve) -> None:
    served = await serve()
    async with served.client.get("/live") as response:
        assert response.status == 200
    async with served.client.get("/ready") as response:
        assert (response.status, await response.json()) == (200, {"ready": True, "reason": "serving"})
    served.generator.ready = Readiness(False, "no prefiller is reachable")
    async with served.client.get("/ready") as response:
        assert (response.status, (await response.json())["reason"]) == (503, "no prefiller is reachable")
    async with served.client.get("/health") as response:
        assert (await response.json())["node"] == "n0"
    async with served.client.get("/metrics") as response:
        assert response.content_type == "text/plain"
        metrics = await response.text()
    assert "pdd_up 1" in metrics
    assert 'pdd:http_responses_total{path="/ready",status="503"} 1.0' in metrics


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/chat/completions", 405), ("POST", "/nothing", 404), ("PUT", "/live", 405)],
)
async def test_paths_and_methods_that_do_not_exist(serve: Serve, method: str, path: str, status: int) -> None:
    served = await serve()
    async with served.client.request(method, path, json={}) as response:
        assert response.status == status
        assert (await response.json())["error"]["code"] in ("not_found", "method_not_allowed")


async def test_ids_come_from_us(serve: Serve) -> None:
    served = await serve()
    headers = {"x-request-id": "mine"}
    body = {"model": "m", "prompt": "x"}
    seen = set()
    for stream in (False, True):
        async with served.client.post("/v1/completions", json={**body, "stream": stream}, headers=headers) as response:
            await response.read()
            seen.add(response.headers["x-request-id"])
    assert seen == {request.id for request in served.generator.requests}
    assert "mine" not in seen


async def test_tokens_and_back(serve: Serve) -> None:
    served = await serve()
    _, answer = await served.post("/tokenize", prompt="the 🦊")
    assert answer["count"] == len(answer["tokens"])
    assert answer["max_model_len"] == 256
    _, back = await served.post("/detokenize", tokens=answer["tokens"])
    assert back == {"prompt": "the 🦊"}
    _, chat = await served.post("/tokenize", messages=[{"role": "user", "content": "hi"}])
    await served.chat()
    assert tuple(chat["tokens"]) == served.generator.requests[0].prompt
    status, _ = await served.post("/detokenize", tokens=[10**9])
    assert status == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("num_first", [0, 2])
async def test_a_client_that_goes_away_cancels(serve: Serve, stream: bool, num_first: int) -> None:
    """Before the first token and in the middle."""
    never = asyncio.Event()
    waiting = asyncio.Event()

    def script(request: GenerateRequest) -> Any:
        yield from outputs_of(request, [300, 301, 302])[:num_first]
        waiting.set()
        yield never

    served = await serve(script)
    body = {"model": "m", "prompt": "x", "stream": stream}

    async def ask() -> None:
        async with served.client.post("/v1/completions", json=body) as response:
            await response.read()

    asked = asyncio.create_task(ask())
    await waiting.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    await served.generator.any_closed.wait()
    assert served.generator.closed == {served.generator.requests[0].id: True}


async def test_a_client_that_does_not_read_holds_the_generator_back(serve: Serve) -> None:
    """Socket buffers fill, and then nothing more is generated for it."""
    logprobs_bytes = 1000

    def script(request: GenerateRequest) -> Any:
        while True:
            yield TokenOutput(request=request.id, tokens=(300,) * logprobs_bytes)

    served = await serve(script)
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port, limit=1)
    body = json.dumps({"model": "m", "prompt": "x", "stream": True}).encode()
    writer.write(POST + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    await reader.readexactly(1)
    before = -1
    while before != served.generator.num_yielded:
        before = served.generator.num_yielded
        await quiet()
    assert before < 50_000
    writer.transport.abort()
    await served.generator.any_closed.wait()
    assert list(served.generator.closed.values()) == [True]


async def quiet(rounds: int = 2000) -> None:
    """Lets everything run that can."""
    for _ in range(rounds):
        await asyncio.sleep(0)


async def test_stopping_ends_running_answers(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdd.http.server.SHUTDOWN_S", 0.01)
    never = asyncio.Event()
    served: Served = await serve(lambda request: [*outputs_of(request, [300, 301])[:1], never])
    async with served.client.post("/v1/completions", json={"model": "m", "prompt": "x", "stream": True}) as response:
        await response.content.readline()
        await served.server.stop()
        assert list(served.generator.closed.values()) == [True]


async def test_bytes_that_are_no_http(serve: Serve) -> None:
    served = await serve()
    for raw in (
        b"\x00\xff" * 500,
        b"GET / HTTP/9.9\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 500\r\n\r\nhalf",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
        writer.write(raw)
        writer.write_eof()
        await reader.read()
        writer.close()
        await writer.wait_closed()
    assert (await served.complete())[0] == 200


async def test_a_compressed_body_is_not_unpacked(serve: Serve) -> None:
    served = await serve()
    headers = {"Content-Type": "application/json", "Content-Encoding": "deflate"}
    bomb = zlib.compress(b'{"model": "m", "prompt": "' + b"x" * 10**7 + b'"}')
    async with served.client.post("/v1/completions", data=bomb, headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"
    assert served.generator.requests == []


async def test_a_body_that_does_not_come_is_not_waited_for_forever(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pdd.http.server.READ_BODY_S", 0.0)
    served = await serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"
    )
    assert b"408" in await reader.readline()
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded"])
async def test_what_any_web_page_may_send_is_refused(serve: Serve, content_type: str) -> None:
    served = await serve()
    headers = {"Content-Type": content_type}
    async with served.client.post("/v1/completions", data=b'{"model":"m","prompt":"x"}', headers=headers) as response:
        assert response.status == 415
        assert (await response.json())["error"]["code"] == "unsupported_media_type"
    assert served.generator.requests == []
