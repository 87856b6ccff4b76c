"""Requests for an OpenAI server, sent as a plan says and timed as a client sees them."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Iterator, Sequence

import aiohttp
import msgspec

WORDS = (
    *("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state", "family"),
    *("group", "country", "problem", "hand", "part", "place", "case", "week", "company", "system", "question", "work"),
    *("number", "night", "point", "home", "water", "room", "mother", "area", "money", "story", "fact", "month", "lot"),
)
MAX_LINE_BYTES = 4 * 1024 * 1024


class Job(msgspec.Struct, frozen=True, kw_only=True):
    prompt: str
    max_tokens: int
    start_s: float
    """When it is to be sent, from the start of the run; 0 in a closed loop."""


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where jobs go, and what every request says."""

    url: str
    """Up to and including `/v1`."""
    model: str
    chat: bool
    extra: dict[str, object]

    def path_and_body(self, job: Job) -> tuple[str, dict[str, object]]:
        body = {
            "model": self.model,
            "max_tokens": job.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }
        if self.chat:
            return f"{self.url}/chat/completions", {**body, "messages": [{"role": "user", "content": job.prompt}]}
        return f"{self.url}/completions", {**body, "prompt": job.prompt}


class Timing(msgspec.Struct, kw_only=True):
    """One request: seconds from its sending on. `error` is empty where the whole answer came."""

    error: str = ""
    """A status, or what broke."""
    detail: str = ""
    """The beginning of what the server said to it."""
    text_at_s: list[float] = []
    """When each chunk with text came."""
    end_s: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.text_at_s[0]

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None where there is no second."""
        if self.completion_tokens < 2:
            return None
        return (self.text_at_s[-1] - self.text_at_s[0]) / (self.completion_tokens - 1)

    @property
    def gaps_s(self) -> list[float]:
        """Between chunks; a chunk may hold more than one token."""
        return [later - earlier for earlier, later in zip(self.text_at_s, self.text_at_s[1:], strict=False)]


class TokenCount(msgspec.Struct, frozen=True):
    """How a server counts a prompt of words: `fixed + words * per_word`."""

    fixed: float
    """The chat template and the unique word."""
    per_word: float

    def num_words(self, num_tokens: int) -> int:
        return max(0, round((num_tokens - self.fixed) / self.per_word))


class Prompts:
    """Prompts of random words. Each starts with a word that no other prompt of any run has, after what all share."""

    def __init__(self, rng: random.Random, count: TokenCount, *, shared_prefix_tokens: int) -> None:
        self._rng = rng
        self._count = count
        self._shared = rng.choices(WORDS, k=round(shared_prefix_tokens / count.per_word))

    def next(self, num_tokens: int) -> str:
        """About `num_tokens` tokens, the shared ones among them."""
        num_own = max(0, self._count.num_words(num_tokens) - len(self._shared))
        return " ".join([*self._shared, secrets.token_hex(4), *self._rng.choices(WORDS, k=num_own)])


def arrivals(rng: random.Random, rate_per_s: float | None) -> Iterator[float]:
    """Start times of a Poisson process; zeros without a rate."""
    now_s = 0.0
    while True:
        yield now_s
        if rate_per_s is not None:
            now_s += rng.expovariate(rate_per_s)


async def first_model(session: aiohttp.ClientSession, url: str) -> str:
    async with session.get(f"{url}/models") as response:
        response.raise_for_status()
        model: str = (await response.json())["data"][0]["id"]
        return model


async def send(session: aiohttp.ClientSession, target: Target, job: Job) -> Timing:
    """Sends one job and reads its whole stream; never raises for what a server may do."""
    timing = Timing()
    started_s = time.perf_counter()
    path, body = target.path_and_body(job)
    try:
        async with session.post(path, json=body) as response:
            if response.status != 200:
                timing.error = str(response.status)
                timing.detail = (await response.text(errors="replace"))[:500]
            else:
                await _read(_events(response), timing, started_s)
    except TimeoutError:
        timing.error = "timeout"
    except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
        timing.error = type(error).__name__
    timing.end_s = time.perf_counter() - started_s
    return timing


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for line in response.content:
        if line.startswith(b"data:"):
            yield line[5:].strip()


async def _read(events: AsyncIterator[bytes], timing: Timing, started_s: float) -> None:
    timing.error = "incomplete stream"
    async for data in events:
        if data == b"[DONE]":
            timing.error = "" if timing.text_at_s else "no text"
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            timing.error = "error in stream"
            return
        if any(choice.get("text") or choice.get("delta", {}).get("content") for choice in event["choices"]):
            timing.text_at_s.append(time.perf_counter() - started_s)
        if usage := event.get("usage"):
            timing.prompt_tokens = usage["prompt_tokens"]
            timing.completion_tokens = usage["completion_tokens"]
            timing.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


async def open_loop(session: aiohttp.ClientSession, target: Target, jobs: Sequence[Job]) -> list[Timing]:
    """Every job at its own time, however many are still running."""
    started_s = time.perf_counter()

    async def one(job: Job) -> Timing:
        await asyncio.sleep(job.start_s - (time.perf_counter() - started_s))
        return await send(session, target, job)

    return await asyncio.gather(*(one(job) for job in jobs))


async def closed_loop(
    session: aiohttp.ClientSession, target: Target, jobs: Sequence[Job], concurrency: int
) -> list[Timing]:
    """`concurrency` clients, each of which sends its next job when it has the answer to its last."""
    waiting = iter(jobs)
    timings: list[Timing] = []

    async def client() -> None:
        for job in waiting:
            timings.append(await send(session, target, job))  # noqa: PERF401

    await asyncio.gather(*(client() for _ in range(concurrency)))
    return timings
