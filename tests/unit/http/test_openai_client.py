"""The official client, unchanged, against the server."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest
from conftest import Serve, Served
from http_fakes import failure, outputs_of

from pdd.base.errors import NoPath, QueueFull
from pdd.lifecycle.request import FinishReason

USER: Any = [{"role": "user", "content": "What jumps?"}]


def client_of(served: Served) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


async def test_a_chat(serve: Serve) -> None:
    served = await serve("the quick brown 🦊")
    async with client_of(served) as client:
        answer = await client.chat.completions.create(
            model="m", messages=USER, user="u", metadata={"a": "b"}, store=False, seed=3, temperature=0.5
        )
    assert answer.choices[0].message.content == "the quick brown 🦊"
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "stop"
    (request,) = served.generator.requests
    assert answer.id == request.id
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(request.prompt)
    assert answer.usage.completion_tokens == len(served.text.vocabulary.encode("the quick brown 🦊")) + 1
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert served.text.vocabulary.decode(request.prompt) == (
        "<|im_start|>user\nWhat jumps?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert request.sampling.max_tokens == 256 - len(request.prompt)
    assert (request.sampling.seed, request.sampling.temperature) == (3, 0.5)


async def test_a_chat_stream(serve: Serve) -> None:
    served = await serve("Größe 🦊 日本語")
    async with client_of(served) as client:
        stream = await client.chat.completions.create(
            model="m", messages=USER, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    *parts, usage = chunks
    assert parts[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in parts[1:])
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == "Größe 🦊 日本語"
    assert [chunk.choices[0].finish_reason for chunk in parts] == [None] * (len(parts) - 1) + ["stop"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == served.generator.num_yielded
    assert all(chunk.usage is None for chunk in parts)
    assert {chunk.id for chunk in chunks} == {served.generator.requests[0].id}


async def test_the_synchronous_client(serve: Serve) -> None:
    served = await serve("fox")

    def ask() -> str | None:
        with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none") as client:
            return client.chat.completions.create(model="m", messages=USER).choices[0].message.content

    assert await asyncio.to_thread(ask) == "fox"


async def test_completions_of_several_prompts_and_choices(serve: Serve) -> None:
    served = await serve(lambda request: outputs_of(request, [*request.prompt, 2], step=2))
    async with client_of(served) as client:
        answer = await client.completions.create(model="m", prompt=["the fox", "a dog"], n=2, echo=True)
    assert [choice.text for choice in answer.choices] == ["the foxthe fox"] * 2 + ["a doga dog"] * 2
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    prompts = [served.text.vocabulary.encode(prompt) for prompt in ("the fox", "a dog")]
    assert answer.usage.prompt_tokens == sum(map(len, prompts))
    assert answer.usage.completion_tokens == 2 * sum(len(prompt) + 1 for prompt in prompts)


async def test_a_completion_stream_of_several_choices(serve: Serve) -> None:
    served = await serve("the fox 🦊.")
    async with client_of(served) as client:
        stream = await client.completions.create(model="m", prompt=[5, 6, 7], n=3, stream=True, max_tokens=50)
        texts = ["", "", ""]
        reasons: list[list[str]] = [[], [], []]
        async for chunk in stream:
            (choice,) = chunk.choices
            texts[choice.index] += choice.text
            if choice.finish_reason:
                reasons[choice.index].append(choice.finish_reason)
    assert texts == ["the fox 🦊."] * 3
    assert reasons == [["stop"]] * 3


async def test_logprobs_of_a_chat(serve: Serve) -> None:
    served = await serve("日本")
    async with client_of(served) as client:
        answer = await client.chat.completions.create(model="m", messages=USER, logprobs=True, top_logprobs=2)
        stream = await client.chat.completions.create(
            model="m", messages=USER, logprobs=True, top_logprobs=2, stream=True
        )
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs is not None
            for entry in chunk.choices[0].logprobs.content or []
        ]
    assert answer.choices[0].logprobs is not None
    entries = answer.choices[0].logprobs.content
    assert entries is not None
    assert entries == streamed
    assert b"".join(bytes(entry.bytes or []) for entry in entries) == "日本<|im_end|>".encode()
    assert all(len(entry.top_logprobs) == 2 and entry.logprob == -0.5 for entry in entries)


async def test_logprobs_of_a_completion(serve: Serve) -> None:
    served = await serve("日本 fox")
    async with client_of(served) as client:
        answer = await client.completions.create(model="m", prompt="x", logprobs=2, max_tokens=50)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.text_offset is not None
    assert logprobs.top_logprobs is not None
    assert logprobs.tokens[-1] == "<|im_end|>"
    assert any(token.startswith("bytes:\\x") for token in logprobs.tokens)
    for token, offset in zip(logprobs.tokens[:-1], logprobs.text_offset[:-1], strict=True):
        assert token.startswith("bytes:") or answer.choices[0].text.startswith(token, offset)
    assert all(len(top) == 2 for top in logprobs.top_logprobs)


@pytest.mark.parametrize("stream", [False, True])
async def test_errors_before_the_first_output_are_exceptions_of_the_client(serve: Serve, stream: bool) -> None:
    errors = iter(
        [
            (QueueFull("256 requests wait", retry_after_s=1.2), openai.RateLimitError),
            (NoPath("no decoder is up"), openai.InternalServerError),
        ]
    )
    error, expected = next(errors)
    served = await serve(lambda request: [error])
    async with client_of(served) as client:
        with pytest.raises(expected, match="256 requests wait") as caught:
            await client.chat.completions.create(model="m", messages=USER, stream=stream)
        assert caught.value.response.headers["Retry-After"] == "2"
        assert caught.value.response.headers["x-should-retry"] == "true"
        error, expected = next(errors)
        with pytest.raises(expected, match="no decoder is up"):
            await client.chat.completions.create(model="m", messages=USER, stream=stream)
        served.generator.script = lambda request: [failure(request)]
        with pytest.raises(openai.InternalServerError, match="the prefiller went away") as caught_late:
            await client.chat.completions.create(model="m", messages=USER, stream=stream)
        assert caught_late.value.status_code == 502


async def test_an_error_in_a_stream_is_an_exception_of_the_client(serve: Serve) -> None:
    served = await serve(
        lambda request: [*outputs_of(request, [260, 261, 262], finish=FinishReason.LENGTH)[:2], failure(request)]
    )
    async with client_of(served) as client:
        stream = await client.chat.completions.create(model="m", messages=USER, stream=True)
        with pytest.raises(openai.APIError, match="the prefiller went away"):
            [chunk async for chunk in stream]


async def test_models(serve: Serve) -> None:
    async with client_of(await serve()) as client:
        assert [model.id async for model in client.models.list()] == ["m"]
        assert (await client.models.retrieve("m")).owned_by == "pdd"
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            await client.models.retrieve("gpt/4")
