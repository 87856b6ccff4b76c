"""`pdd bench serve` against a real server: it reports what happened, errors included."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from conftest import Serve, Served
from http_fakes import failure, outputs_of

from pdd.base.errors import NoPath, OperatorError
from pdd.bench import load
from pdd.bench import serve as bench_serve
from pdd.topology.model import Http


async def bench(url: str, *options: str) -> int:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    args = parser.parse_args(["--url", url, "--prompt-tokens", "20:40", "--num-requests", "6", *options])
    return await asyncio.to_thread(bench_serve.run, args)


def tokens_for(request: Any) -> Any:
    return outputs_of(request, [300 + index % 40 for index in range(request.sampling.max_tokens)])


@pytest.mark.parametrize(
    "options", [["--concurrency", "3"], ["--rate", "500"], ["--chat", "--goodput", "10000,10000"]], ids=" ".join
)
async def test_it_counts_what_was_served(serve: Serve, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    served = await serve(tokens_for)
    assert await bench(served.url, "--output-tokens", "5", "--json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    asked = served.generator.requests[2:]  # the first ones only teach how the server counts
    assert (report["requests"], report["completed"], report["errors"]) == (6, 6, {})
    assert report["completion_tokens"] == 30
    assert report["prompt_tokens"] == sum(len(request.prompt) for request in asked)
    assert all(10 <= len(request.prompt) <= 60 for request in asked)
    assert all(request.sampling.stop_token_ids == () for request in asked)
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert 0 < report[name]["p50"] <= report[name]["p99"] <= report[name]["max"]
    if "--goodput" in options:
        assert report["goodput"]["requests"] == 6


async def test_it_tells_errors_apart(serve: Serve, capsys: pytest.CaptureFixture[str]) -> None:
    def script(request: Any) -> Any:
        match len(served.generator.requests):
            case 3:
                return [NoPath("down")]
            case 4:
                return [*tokens_for(request)[:2], failure(request)]
            case _:
                return tokens_for(request)

    served = await serve(script)
    assert await bench(served.url) == 0
    out = capsys.readouterr().out
    assert "4 of 6 completed" in out
    assert "1 x 503, 1 x error in stream" in out


async def test_nothing_served_is_a_failure(serve: Serve) -> None:
    served: Served = await serve(lambda r: tokens_for(r) if len(served.generator.requests) <= 2 else [NoPath("down")])
    assert await bench(served.url) == 1


async def test_a_server_that_is_none(serve: Serve) -> None:
    served = await serve()
    url = served.url
    await served.server.stop()
    with pytest.raises(OperatorError, match="does not answer"):
        await bench(url)


async def test_keys_and_prompts_from_files(serve: Serve, tmp_path: Path) -> None:
    keys, prompts = tmp_path / "keys", tmp_path / "prompts"
    keys.write_text("secret\n")
    keys.chmod(0o600)
    prompts.write_text("the fox\n\na dog\n")
    served = await serve(tokens_for, http=Http(port=0, api_key_file=keys))
    assert await bench(served.url, "--api-key-file", str(keys), "--prompts-file", str(prompts)) == 0
    texts = [served.text.vocabulary.decode(request.prompt) for request in served.generator.requests[2:]]
    assert texts == ["the fox", "a dog"] * 3


def test_prompts_share_only_the_prefix_that_was_asked_for() -> None:
    def some(shared: int) -> list[str]:
        prompts = load.Prompts(random.Random(0), load.TokenCount(0.0, 1.0), shared_prefix_tokens=shared)
        return [prompts.next(20) for _ in range(2)]

    one, other = some(0)
    assert one.split()[0] != other.split()[0]
    one, other = some(10)
    assert one.split()[:10] == other.split()[:10]
    assert one.split()[10] != other.split()[10]
    assert some(0)[0].split()[0] != some(0)[0].split()[0], "not even those of another run with the same seed"


def test_poisson_arrivals_have_the_rate() -> None:
    times = load.arrivals(random.Random(1), 10.0)
    last_s = [next(times) for _ in range(5001)][-1]
    assert 5000 / last_s == pytest.approx(10.0, rel=0.1)


@pytest.mark.parametrize(
    "options", [["--rate", "0"], ["--rate", "1", "--concurrency", "2"], ["--prompt-tokens", "5:2"], ["--goodput", "5"]]
)
def test_bad_options_are_usage_errors(options: list[str]) -> None:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(options)
