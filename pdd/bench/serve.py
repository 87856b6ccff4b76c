"""`pdd bench serve`: latency, throughput and goodput of any OpenAI server, as its clients see them."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import aiohttp
import msgspec
import numpy as np

from pdd.base.errors import OperatorError
from pdd.bench.load import (
    MAX_LINE_BYTES,
    Job,
    Prompts,
    Target,
    Timing,
    TokenCount,
    arrivals,
    closed_loop,
    first_model,
    open_loop,
    send,
)

PERCENTILES = (50, 90, 99)
PROBE_WORDS = (8, 40)
Range = tuple[int, int]


class Distribution(msgspec.Struct, frozen=True):
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    client_machine: str
    url: str
    model: str
    load: str
    requests: int
    completed: int
    errors: dict[str, int]
    """By HTTP status, or by what broke."""
    duration_s: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    requests_per_s: float
    prompt_tokens_per_s: float
    completion_tokens_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    """Between chunks with text."""
    e2e_ms: Distribution | None
    goodput: dict[str, float] | None
    """The limits, and the requests per second that kept both."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the server, with or without /v1")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--api-key-file", type=Path, help="its first line is sent as the key")
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of /v1/completions")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--rate", type=_positive_float, help="requests per second, Poisson arrivals")
    load.add_argument("--concurrency", type=_positive, default=1, help="clients in a closed loop (default 1)")
    parser.add_argument("--num-requests", type=_positive, default=50)
    parser.add_argument("--prompt-tokens", type=_range, default=(256, 256), metavar="N|A:B", help="default 256")
    parser.add_argument("--output-tokens", type=_range, default=(64, 64), metavar="N|A:B", help="default 64")
    parser.add_argument("--shared-prefix-tokens", type=int, default=0, help="that all prompts begin with")
    parser.add_argument("--prompts-file", type=Path, help="prompts, one a line, instead of random words")
    parser.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for exactly --output-tokens (pdd and vLLM know the field; OpenAI does not)",
    )
    parser.add_argument("--seed", type=int, default=0, help="of words, lengths, arrivals and sampling")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--timeout-s", type=_positive_float, default=600.0)
    parser.add_argument("--goodput", type=_goodput, metavar="TTFT_MS,TPOT_MS", help="count requests within both")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Exit codes: 0 measured, 1 when no request was answered. Raises OperatorError when the server does not answer."""
    report = asyncio.run(_measure(args))
    print(json.dumps(msgspec.to_builtins(report)) if args.json else _text(report))
    return 0 if report.completed else 1


async def _measure(args: argparse.Namespace) -> Report:
    url = args.url.rstrip("/").removesuffix("/v1") + "/v1"
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        headers=_headers(args.api_key_file),
        timeout=aiohttp.ClientTimeout(total=args.timeout_s),
        read_bufsize=MAX_LINE_BYTES,
    ) as session:
        try:
            model = args.model or await first_model(session, url)
        except (aiohttp.ClientError, OSError, LookupError, ValueError) as error:
            raise OperatorError(f"{url}/models does not answer as an OpenAI server does: {error}") from error
        extra: dict[str, object] = {"temperature": args.temperature, "seed": args.seed}
        target = Target(
            url=url, model=model, chat=args.chat, extra=extra | ({"ignore_eos": True} if args.ignore_eos else {})
        )
        jobs = _jobs(args, await _token_count(session, target, args.seed))
        started_s = time.perf_counter()
        if args.rate is None:
            timings = await closed_loop(session, target, jobs, args.concurrency)
        else:
            timings = await open_loop(session, target, jobs)
        return _report(args, target, timings, time.perf_counter() - started_s)


async def _token_count(session: aiohttp.ClientSession, target: Target, seed: int) -> TokenCount:
    """From two requests of different lengths, which are no part of the figures."""
    counted = []
    for num_words in PROBE_WORDS:
        prompts = Prompts(random.Random(seed), TokenCount(0.0, 1.0), shared_prefix_tokens=0)  # noqa: S311
        timing = await send(session, target, Job(prompt=prompts.next(num_words), max_tokens=2, start_s=0.0))
        if timing.error:
            raise OperatorError(f"{target.url} answers a first request with: {timing.error} {timing.detail}")
        counted.append(timing.prompt_tokens)
    per_word = max(1.0, (counted[1] - counted[0]) / (PROBE_WORDS[1] - PROBE_WORDS[0]))
    return TokenCount(max(0.0, counted[0] - PROBE_WORDS[0] * per_word), per_word)


def _jobs(args: argparse.Namespace, count: TokenCount) -> list[Job]:
    rng = random.Random(args.seed)  # noqa: S311 - load, not secrets
    prompts = Prompts(rng, count, shared_prefix_tokens=args.shared_prefix_tokens)
    lines = _lines(args.prompts_file) if args.prompts_file else None
    return [
        Job(
            prompt=lines[number % len(lines)] if lines else prompts.next(rng.randint(*args.prompt_tokens)),
            max_tokens=rng.randint(*args.output_tokens),
            start_s=start_s,
        )
        for number, start_s in zip(range(args.num_requests), arrivals(rng, args.rate), strict=False)
    ]


def _report(args: argparse.Namespace, target: Target, timings: Sequence[Timing], duration_s: float) -> Report:
    done = [timing for timing in timings if not timing.error]
    tpot_s = [timing.tpot_s for timing in done if timing.tpot_s is not None]
    completion_tokens = sum(timing.completion_tokens for timing in done)
    prompt_tokens = sum(timing.prompt_tokens for timing in done)
    return Report(
        client_machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python"
        f" {platform.python_version()}",
        url=target.url,
        model=target.model,
        load=f"{args.concurrency} clients in a closed loop"
        if args.rate is None
        else f"Poisson, {args.rate} requests/s",
        requests=len(timings),
        completed=len(done),
        errors=dict(Counter(timing.error for timing in timings if timing.error)),
        duration_s=duration_s,
        prompt_tokens=prompt_tokens,
        cached_tokens=sum(timing.cached_tokens for timing in done),
        completion_tokens=completion_tokens,
        requests_per_s=len(done) / duration_s,
        prompt_tokens_per_s=prompt_tokens / duration_s,
        completion_tokens_per_s=completion_tokens / duration_s,
        ttft_ms=_distribution([timing.ttft_s for timing in done]),
        tpot_ms=_distribution(tpot_s),
        itl_ms=_distribution([gap for timing in done for gap in timing.gaps_s]),
        e2e_ms=_distribution([timing.end_s for timing in done]),
        goodput=None if args.goodput is None else _goodput_of(done, args.goodput, duration_s),
    )


def _distribution(seconds: Sequence[float]) -> Distribution | None:
    if not seconds:
        return None
    ms = np.asarray(seconds) * 1000
    p50, p90, p99 = (float(value) for value in np.percentile(ms, PERCENTILES))
    return Distribution(mean=float(ms.mean()), p50=p50, p90=p90, p99=p99, max=float(ms.max()))


def _goodput_of(done: Sequence[Timing], limits_ms: tuple[float, float], duration_s: float) -> dict[str, float]:
    ttft_ms, tpot_ms = limits_ms
    good = sum(timing.ttft_s * 1000 <= ttft_ms and (timing.tpot_s or 0) * 1000 <= tpot_ms for timing in done)
    return {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "requests": good, "requests_per_s": good / duration_s}


def _text(report: Report) -> str:
    lines = [
        f"client   {report.client_machine}",
        f"server   {report.url}, model {report.model}",
        f"load     {report.load}",
        f"requests {report.completed} of {report.requests} completed in {report.duration_s:.2f} s",
        "errors   " + (", ".join(f"{count} x {what}" for what, count in sorted(report.errors.items())) or "none"),
        f"tokens   {report.prompt_tokens} prompt ({report.cached_tokens} of them cached),"
        f" {report.completion_tokens} completion",
        f"rate     {report.requests_per_s:.3f} requests/s, {report.prompt_tokens_per_s:.1f} prompt tokens/s,"
        f" {report.completion_tokens_per_s:.1f} completion tokens/s",
        f"\n{'ms':9}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}{'max':>10}",
    ]
    rows = {"TTFT": report.ttft_ms, "TPOT": report.tpot_ms, "ITL": report.itl_ms, "end to end": report.e2e_ms}
    for name, row in rows.items():
        figures = "" if row is None else "".join(f"{value:10.2f}" for value in msgspec.structs.astuple(row))
        lines.append(f"{name:10}{figures[1:]}" if figures else f"{name:10}-")
    if goodput := report.goodput:
        lines.append(
            f"\ngoodput  {goodput['requests_per_s']:.3f} requests/s ({goodput['requests']:.0f} of {report.requests})"
            f" with TTFT <= {goodput['ttft_ms']:g} ms and TPOT <= {goodput['tpot_ms']:g} ms"
        )
    return "\n".join(lines)


def _headers(key_file: Path | None) -> dict[str, str]:
    if key_file is None:
        return {}
    return {"Authorization": f"Bearer {_lines(key_file)[0]}"}


def _lines(path: Path) -> list[str]:
    """Lines that are not empty. Raises OperatorError when there are none."""
    try:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise OperatorError(f"{path} cannot be read: {error}") from error
    if not lines:
        raise OperatorError(f"{path} is empty")
    return lines


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def _positive_float(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _range(text: str) -> Range:
    low, _, high = text.partition(":")
    bounds = (_positive(low), _positive(high or low))
    if bounds[0] > bounds[1]:
        raise argparse.ArgumentTypeError(f"{text} ends before it begins")
    return bounds


def _goodput(text: str) -> tuple[float, float]:
    ttft_ms, comma, tpot_ms = text.partition(",")
    if not comma:
        raise argparse.ArgumentTypeError("write two numbers: TTFT_MS,TPOT_MS")
    return _positive_float(ttft_ms), _positive_float(tpot_ms)
