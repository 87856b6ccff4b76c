"""Whatever is wrong with a request is a 400 that names it, and nothing is submitted."""

from __future__ import annotations

import json
from typing import Any

import pytest
from conftest import MAX_SEQUENCE_TOKENS, Serve

from pdd.topology.model import Limits

USER = {"role": "user", "content": "hi"}
VOCAB_SIZE = 352
BAD_FOR_BOTH: list[tuple[dict[str, Any], str | None]] = [
    ({"foo": 1}, "foo"),
    ({"kv_transfer_params": {"host": "10.0.0.1"}}, "kv_transfer_params"),
    ({"request_id": "mine"}, "request_id"),
    ({"model": None}, "model"),
    ({"n": 0}, "n"),
    ({"n": 17}, "n"),
    ({"n": True}, "n"),
    ({"n": 1.5}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": "5"}, "max_tokens"),
    ({"max_tokens": 2**70}, None),
    ({"max_tokens": MAX_SEQUENCE_TOKENS}, None),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"temperature": -0.1}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 0}, "top_p"),
    ({"top_p": 1.01}, "top_p"),
    ({"top_k": -2}, "top_k"),
    ({"top_k": 2**40}, "top_k"),
    ({"min_p": 1.5}, "min_p"),
    ({"frequency_penalty": 2.5}, "frequency_penalty"),
    ({"presence_penalty": -2.5}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"seed": 1.5}, "seed"),
    ({"seed": "x"}, "seed"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": {"٣": 1}}, "logit_bias"),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ({"logit_bias": {str(VOCAB_SIZE): 1}}, "logit_bias"),
    ({"logit_bias": {"1": 101}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"stop": ""}, "stop"),
    ({"stop": ["a", ""]}, "stop[1]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stop": 5}, "stop"),
    ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"tools": [{"type": "function"}]}, "tools"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"use_beam_search": True}, "use_beam_search"),
]
BAD_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hi"}, "messages"),
    ({"messages": [{"content": "hi"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [USER, {"role": "wizard", "content": "x"}]}, "messages[1].role"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls"),
    ({"messages": [{"role": "user", "content": "x", "foo": 1}]}, "messages[0].foo"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        "messages[0].content[0].type",
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": "word " * 500}]}, "messages"),
    ({"logprobs": 5}, "logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
    ({"max_completion_tokens": MAX_SEQUENCE_TOKENS}, "messages"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": 5}, "chat_template_kwargs"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ({"audio": {"voice": "x"}}, "audio"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"prompt": "x"}, "prompt"),
]
BAD_COMPLETIONS: list[tuple[dict[str, Any], str | None]] = [
    ({"prompt": None}, "prompt"),
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": ["a", ""]}, "prompt[1]"),
    ({"prompt": [[5], []]}, "prompt[1]"),
    ({"prompt": [5, "a"]}, "prompt"),
    ({"prompt": ["a", 5]}, "prompt"),
    ({"prompt": [5, True]}, "prompt"),
    ({"prompt": [5, 1.5]}, "prompt"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [10**30]}, "prompt"),
    ({"prompt": {"a": 1}}, "prompt"),
    ({"prompt": [5] * MAX_SEQUENCE_TOKENS}, "prompt"),
    ({"prompt": [5] * (MAX_SEQUENCE_TOKENS - 1), "max_tokens": 2}, "prompt"),
    ({"prompt": ["a"] * 129}, "prompt"),
    ({"prompt": ["a"] * 65, "n": 2}, "prompt"),
    ({"logprobs": 21}, "logprobs"),
    ({"logprobs": True}, "logprobs"),
    ({"logprobs": 1, "echo": True}, "logprobs"),
    ({"best_of": 2}, "best_of"),
    ({"suffix": "x"}, "suffix"),
    ({"messages": [USER]}, "messages"),
]


JSON = {"Content-Type": "application/json"}


def names(value: object) -> str:
    return json.dumps(value)[:60]


@pytest.mark.parametrize(("fields", "param"), BAD_FOR_BOTH + BAD_CHATS, ids=names)
async def test_a_bad_chat(serve: Serve, fields: dict[str, Any], param: str | None) -> None:
    served = await serve()
    status, answer = await served.chat(**fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == (param or "messages")
    assert served.generator.requests == []


@pytest.mark.parametrize(("fields", "param"), BAD_FOR_BOTH + BAD_COMPLETIONS, ids=names)
async def test_a_bad_completion(serve: Serve, fields: dict[str, Any], param: str | None) -> None:
    served = await serve()
    status, answer = await served.complete(**fields)
    assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
    assert answer["error"]["param"] == (param or "prompt")
    assert served.generator.requests == []


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "\xed\xa0\x80"}',
        b'{"model": "m", "prompt": "x", "temperature": NaN}',
        b'{"model": "m", "prompt": "x", "temperature": Infinity}',
        b'{"model": "m", "prompt": "x", "temperature": 1e999}',
        b'{"model": "m", "prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "prompt": "x"} {}',
        b"\x80\x04\x95\x10\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94.",
    ],
    ids=lambda raw: repr(raw)[:50],
)
async def test_a_body_that_is_no_request(serve: Serve, raw: bytes) -> None:
    served = await serve()
    async with served.client.post("/v1/completions", data=raw, headers=JSON) as response:
        assert response.status == 400
        assert (await response.json())["error"]["message"]
    assert served.generator.requests == []
    assert (await served.complete())[0] == 200


async def test_too_long_tells_both_numbers(serve: Serve) -> None:
    served = await serve()
    _, answer = await served.complete(prompt=[5] * 300)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "256" in answer["error"]["message"]
    assert "300" in answer["error"]["message"]
    _, answer = await served.complete(prompt=[5] * 200, max_tokens=57)
    assert answer["error"]["code"] == "context_length_exceeded"
    assert "257" in answer["error"]["message"]


async def test_the_longest_sequence_fits(serve: Serve) -> None:
    served = await serve("fox " * 300)
    assert (await served.complete(prompt=[5] * 255, max_tokens=1))[0] == 200
    assert (await served.complete(prompt=[5] * 56, max_tokens=200))[0] == 200
    status, answer = await served.complete(prompt=[5] * 250)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 6), "a default shrinks to what is left"


async def test_another_model(serve: Serve) -> None:
    served = await serve()
    status, answer = await served.chat(model="gpt-4")
    assert (status, answer["error"]["code"]) == (404, "model_not_found")


async def test_a_body_that_is_too_large(serve: Serve) -> None:
    served = await serve(limits=Limits(max_body_bytes=1000))
    status, answer = await served.complete(prompt="x" * 2000)
    assert (status, answer["error"]["code"]) == (413, "request_too_large")
    assert (await served.complete())[0] == 200


async def test_a_chat_without_a_template(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    served = await serve()
    monkeypatch.setattr(served.text, "template", None)
    status, answer = await served.chat()
    assert status == 400
    assert "/v1/completions" in answer["error"]["message"]
