"""What the clients of `pdd soak` ask for, and whether what they got is what the toy must say.

The toy's text follows from the prompt alone when every byte of KV is right, so each answer, and each beginning of one
that was cut off, is compared with the text that `continuation` foretells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Any

import aiohttp
import msgspec

from pdd.engine.config import ModelConfig
from pdd.engine.toy import continuation
from pdd.memory.layout import KvLayout

HUNG_S = 45.0
"""More than any deadline of the cluster: an answer that has not ended by then never will."""
PROBE_TOKENS = 80
"""Enough for a handoff."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    prompt: list[int]
    max_tokens: int
    stream: bool = False
    num_choices: int = 1
    stop: str | None = None
    ignore_eos: bool = True
    leaves_after_s: float | None = None
    """When the client vanishes; None: it waits for the end."""

    def body(self) -> dict[str, Any]:
        body = {"model": "toy", "temperature": 0, "prompt": self.prompt, "max_tokens": self.max_tokens,
                "stream": self.stream, "n": self.num_choices, "ignore_eos": self.ignore_eos}  # fmt: skip
        return body if self.stop is None else {**body, "stop": self.stop}


class Answer(msgspec.Struct, kw_only=True):
    texts: list[str]
    """Of each choice, as far as it came."""
    finish_reasons: list[str | None]
    id: str = ""
    error: str = ""
    """Why it is no whole answer: a status and code, or what broke."""


class Wrong(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    prompt_tokens: int
    expected: str
    got: str


class Oracle:
    """What the toy must say."""

    def __init__(self, config: ModelConfig, page_tokens: int) -> None:
        self._config = config
        self._eos = 256
        self._layout = KvLayout(
            num_layers=config.num_layers, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim,
            page_tokens=page_tokens, dtype="float32", num_pages=1,
        )  # fmt: skip

    def text(self, ask: Ask) -> tuple[str, str]:
        """Text and finish reason."""
        tokens = continuation(self._config, self._layout, ask.prompt, ask.max_tokens)
        reason = "length"
        if not ask.ignore_eos and self._eos in tokens:
            tokens, reason = tokens[: tokens.index(self._eos)], "stop"
        text = bytes(token for token in tokens if token < 256).decode(errors="replace")
        if ask.stop is not None and ask.stop in text:
            return text[: text.index(ask.stop)], "stop"
        return text, reason

    def contradicts(self, ask: Ask, answer: Answer) -> str | None:
        """The text that should have come instead, or None where the answer, or what there is of it, is right."""
        text, reason = self.text(ask)
        for got, got_reason in zip(answer.texts, answer.finish_reasons, strict=True):
            whole = got_reason is not None
            if not text.startswith(got) or (whole and (got, got_reason) != (text, reason)):
                return text
        return None


class Asks:
    """An endless mix: short and long prompts, some with beginnings that others share, and all kinds of clients."""

    def __init__(self, rng: random.Random, oracle: Oracle) -> None:
        self._rng = rng
        self._oracle = oracle
        self._prefixes = [self._tokens(rng.choice((40, 160, 500))) for _ in range(4)]

    def next(self) -> Ask:
        rng = self._rng
        if rng.random() < 0.02:
            self._prefixes[rng.randrange(4)] = self._tokens(rng.choice((40, 160, 500)))
        own = self._tokens(rng.choice((rng.randint(1, 24), rng.randint(25, 200), rng.randint(300, 1200))))
        prefix = rng.choice(self._prefixes) if rng.random() < 0.3 else []
        ask = Ask(
            prompt=[*prefix, *own],
            max_tokens=rng.choice((1, 2, rng.randint(3, 32))),
            stream=rng.random() < 0.5,
            num_choices=2 if rng.random() < 0.1 else 1,
            ignore_eos=rng.random() < 0.8,
            leaves_after_s=rng.expovariate(4) if rng.random() < 0.15 else None,
        )
        return self._with_stop(ask) if rng.random() < 0.2 else ask

    def probe(self) -> Ask:
        return Ask(prompt=self._tokens(PROBE_TOKENS), max_tokens=1)

    def _with_stop(self, ask: Ask) -> Ask:
        """One that its text contains, where there is text."""
        letters = [letter for letter in self._oracle.text(ask)[0] if letter != "\ufffd"]
        return msgspec.structs.replace(ask, stop=self._rng.choice(letters)) if letters else ask

    def _tokens(self, num: int) -> list[int]:
        return self._rng.choices(range(250), k=num)


class Traffic:
    """Clients in a closed loop against the HTTP ports of all nodes, and what became of their requests."""

    def __init__(self, urls: list[str], asks: Asks, oracle: Oracle, rng: random.Random) -> None:
        self._urls = urls
        self._asks = asks
        self._oracle = oracle
        self._rng = rng
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self.outcomes: Counter[str] = Counter()
        self.wrong: list[Wrong] = []

    async def close(self) -> None:
        await self._session.close()

    async def client(self, until_s: float) -> None:
        """One client, until `time.monotonic()` is `until_s`."""
        while time.monotonic() < until_s:
            outcome = await self.ask(self._rng.choice(self._urls), self._asks.next())
            # A server that is down refuses at once: do not count the same refusal a thousand times.
            await asyncio.sleep(self._rng.expovariate(20) if outcome in ("right", "left") else 0.3)

    async def probe(self, url: str) -> bool:
        """Whether a prompt long enough for a handoff is answered, and rightly, there."""
        return await self.ask(url, self._asks.probe()) == "right"

    async def ask(self, url: str, ask: Ask) -> str:
        """Asks, checks, counts; returns the outcome."""
        answer = Answer(texts=[""] * ask.num_choices, finish_reasons=[None] * ask.num_choices)
        try:
            async with asyncio.timeout(HUNG_S if ask.leaves_after_s is None else ask.leaves_after_s):
                await self._exchange(url, ask, answer)
        except TimeoutError:
            answer.error = "hung" if ask.leaves_after_s is None else "left"
        except (aiohttp.ClientError, OSError, ValueError, LookupError, TypeError) as error:
            answer.error = f"connection: {type(error).__name__}"
        outcome = answer.error or ("right" if all(answer.finish_reasons) else "ended early")
        if (expected := self._oracle.contradicts(ask, answer)) is not None:
            outcome = "wrong"
            got = repr(list(zip(answer.texts, answer.finish_reasons, strict=True)))
            self.wrong.append(Wrong(id=answer.id, prompt_tokens=len(ask.prompt), expected=expected, got=got))
        self.outcomes[outcome] += 1
        return outcome

    async def _exchange(self, url: str, ask: Ask, answer: Answer) -> None:
        async with self._session.post(f"{url}/v1/completions", json=ask.body()) as response:
            if response.status != 200:
                with contextlib.suppress(ValueError, LookupError, TypeError):
                    answer.error = f"{response.status} {(await response.json())['error']['code']}"
                answer.error = answer.error or str(response.status)
            elif ask.stream:
                await _read_stream(response, answer)
            else:
                _take(await response.json(), answer)


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for line in response.content:
        if not line.startswith(b"data: ") or line.strip() == b"data: [DONE]":
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            answer.error = f"in stream: {event['error']['code']}"
            return
        _take(event, answer)


def _take(part: dict[str, Any], answer: Answer) -> None:
    answer.id = part["id"]
    for choice in part["choices"]:
        answer.texts[choice["index"]] += choice["text"]
        answer.finish_reasons[choice["index"]] = choice["finish_reason"] or answer.finish_reasons[choice["index"]]
