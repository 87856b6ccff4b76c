"""What comes back: lengths, stops, seeds, defaults, and choices that share a prompt."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from conftest import Serve, Served
from http_fakes import failure, outputs_of

from pdd.lifecycle.request import FinishReason, GenerateRequest, TokenOutput


async def events(served: Served, path: str, **fields: Any) -> list[Any]:
    """The data of each event: JSON, or the text `[DONE]`."""
    async with served.client.post(path, json={"model": "m", "stream": True, **fields}) as response:
        assert response.status == 200
        assert response.content_type == "text/event-stream"
        raw = (await response.read()).decode()
    lines = raw.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


CHAT = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("max_tokens", [1, 2])
@pytest.mark.parametrize("step", [1, 3])
async def test_exactly_max_tokens(serve: Serve, max_tokens: int, step: int) -> None:
    served = await serve(lambda request: outputs_of(request, [300, 301, 302, 303], step=step))
    status, answer = await served.complete(max_tokens=max_tokens)
    assert status == 200
    assert answer["usage"]["completion_tokens"] == max_tokens
    assert answer["choices"][0]["finish_reason"] == "length"
    chunks = await events(
        served, "/v1/chat/completions", **CHAT, max_tokens=max_tokens, stream_options={"include_usage": True}
    )
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["usage"]["completion_tokens"] == max_tokens
    assert chunks[-3]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_first_token_that_ends_it(serve: Serve, stream: bool) -> None:
    served = await serve("")
    if stream:
        chunks = await events(served, "/v1/chat/completions", **CHAT)
        assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [{"role": "assistant", "content": ""}, {}]
        assert chunks[1]["choices"][0]["finish_reason"] == "stop"
    else:
        _, answer = await served.chat()
        assert answer["choices"][0]["message"]["content"] == ""
        assert answer["choices"][0]["finish_reason"] == "stop"
        assert answer["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize("step", [1, 2, 50])
@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_across_tokens(serve: Serve, step: int, include: bool, stream: bool) -> None:
    tokens: list[int] = []
    served = await serve(lambda request: outputs_of(request, [*tokens, 2], step=step))
    tokens += served.text.vocabulary.encode("a fox!\n\nUser: what")
    fields = {"stop": ["zzz", "\n\nUser:"], "include_stop_str_in_output": include, "max_tokens": 50}
    if stream:
        chunks = await events(served, "/v1/completions", prompt="x", **fields)
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1])
        reason = chunks[-2]["choices"][0]["finish_reason"]
    else:
        _, answer = await served.complete(**fields)
        text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
        upto = len(served.text.vocabulary.encode("a fox!\n\nUser:"))
        assert answer["usage"]["completion_tokens"] == upto
    assert text == ("a fox!\n\nUser:" if include else "a fox!")
    assert reason == "stop"
    if step < 50:  # else the last output came with it, and there is nothing left to stop
        assert served.generator.stopped == [served.generator.requests[0].id]


async def test_an_answer_that_begins_anew_is_whole(serve: Serve) -> None:
    """Its replica was lost after a part, which is forgotten: text, tokens, a begun stop string, logprobs."""

    def script(request: GenerateRequest) -> list[TokenOutput]:
        lost = outputs_of(request, served.text.vocabulary.encode("lost \n\nUs"), step=2)[:-1]
        first, *others = outputs_of(request, served.text.vocabulary.encode("er: found"), step=2)
        return [*lost, msgspec.structs.replace(first, anew=True), *others]

    served = await serve(script)
    _, answer = await served.complete(stop="\n\nUser:", max_tokens=50, logprobs=1)
    [choice] = answer["choices"]
    num_tokens = len(served.text.vocabulary.encode("er: found"))
    assert (choice["text"], choice["finish_reason"]) == ("er: found", "stop")
    assert (answer["usage"]["completion_tokens"], len(choice["logprobs"]["tokens"])) == (num_tokens, num_tokens)
    assert served.generator.shown_at == {}, "nothing was sent before the end"


async def test_a_stream_says_at_once_that_it_was_shown(serve: Serve) -> None:
    served = await serve(lambda request: outputs_of(request, [300, 301, 302]))
    await events(served, "/v1/completions", prompt="x", ignore_eos=True)
    assert served.generator.shown_at == {served.generator.requests[0].id: 1}


async def test_a_beginning_of_a_stop_string_comes_out_at_the_end(serve: Serve) -> None:
    served = await serve("a fox!\n\nUs")
    _, answer = await served.complete(stop="\n\nUser:", max_tokens=50)
    assert answer["choices"][0]["text"] == "a fox!\n\nUs"


async def test_stop_strings_before_min_tokens_do_not_count(serve: Serve) -> None:
    served = await serve("fox fox fox fox")
    first = len(served.text.vocabulary.encode("fox fox"))
    _, answer = await served.complete(stop=" fox", min_tokens=first, max_tokens=50)
    assert answer["choices"][0]["text"] == "fox fox"


async def test_special_tokens_are_text_only_on_demand(serve: Serve) -> None:
    served = await serve(lambda request: outputs_of(request, [1, 300, 2]))
    _, answer = await served.complete(skip_special_tokens=False, ignore_eos=True)
    assert answer["choices"][0]["text"].endswith("<|im_end|>")
    _, answer = await served.complete(skip_special_tokens=False)
    assert answer["choices"][0]["text"].startswith("<|im_start|>")
    assert not answer["choices"][0]["text"].endswith("<|im_end|>"), "a stop token is no text"
    _, answer = await served.complete(skip_special_tokens=False, include_stop_str_in_output=True)
    assert answer["choices"][0]["text"].endswith("<|im_end|>")
    _, answer = await served.complete()
    assert "<|" not in answer["choices"][0]["text"]


async def test_sampling_parameters_arrive(serve: Serve) -> None:
    served = await serve()
    await served.complete(
        temperature=0, top_p=0.5, top_k=-1, min_p=0.1, seed=-1, frequency_penalty=1, presence_penalty=-1,
        repetition_penalty=1.5, logit_bias={"7": -100, "007": 5}, stop_token_ids=[9, 2], min_tokens=3, logprobs=0,
    )  # fmt: skip
    sampling = served.generator.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0, 0.5, 0, 0.1)
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty) == (1, -1, 1.5)
    assert sampling.logit_bias == {7: 5.0}
    assert sampling.stop_token_ids == (2, 9)
    assert (sampling.seed, sampling.min_tokens, sampling.num_logprobs, sampling.max_tokens) == (2**64 - 1, 3, 0, 16)


async def test_the_models_defaults_apply_where_the_client_is_silent(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve()
    defaults = msgspec.structs.replace(served.text.config, temperature=0.6, top_k=20, top_p=0.9)
    monkeypatch.setattr(served.text, "config", defaults)
    await served.complete(temperature=None)
    await served.complete(temperature=1, top_k=0, ignore_eos=True)
    first, second = (request.sampling for request in served.generator.requests)
    assert (first.temperature, first.top_k, first.top_p, first.stop_token_ids) == (0.6, 20, 0.9, (2,))
    assert (second.temperature, second.top_k, second.top_p, second.stop_token_ids) == (1, 0, 0.9, ())


async def test_seeds_of_choices(serve: Serve) -> None:
    served = await serve()
    for seed in (5, 5, None, None):
        await served.complete(n=3, seed=seed)
    seeds = [request.sampling.seed for request in served.generator.requests]
    assert seeds[0] == 5
    assert seeds[:3] == seeds[3:6]
    assert len({*seeds[:3], *seeds[6:]}) == 9
    assert all(0 <= seed < 2**64 for seed in seeds)


async def test_siblings_follow_the_first_choices_first_output(serve: Serve) -> None:
    gate = asyncio.Event()

    def script(request: GenerateRequest) -> list[Any]:
        outputs: list[Any] = list(outputs_of(request, [300, 2]))
        return [gate, *outputs] if len(served.generator.requests) == 1 else outputs

    served = await serve(script)
    asked = asyncio.create_task(served.complete(n=3))
    await served.generator.any_submitted.wait()
    assert len(served.generator.requests) == 1
    gate.set()
    status, answer = await asked
    assert (status, len(answer["choices"])) == (200, 3)
    ids = [request.id for request in served.generator.requests]
    assert ids == [answer["id"], f"{answer['id']}-1", f"{answer['id']}-2"]


async def test_one_failed_choice_fails_the_request_and_ends_the_others(serve: Serve) -> None:
    never = asyncio.Event()

    def script(request: GenerateRequest) -> list[Any]:
        if request.id.endswith("-2"):
            return [failure(request)]
        return [*outputs_of(request, [300, 301])[:1], never]

    served = await serve(script)
    status, answer = await served.complete(n=3)
    assert (status, answer["error"]["code"]) == (502, "handoff_failed")
    assert len(served.generator.closed) == 3


async def test_an_error_in_a_stream_ends_it_without_done(serve: Serve) -> None:
    served = await serve(lambda request: [*outputs_of(request, [300, 301, 302])[:2], failure(request)])
    chunks = await events(served, "/v1/completions", prompt="x")
    assert chunks[-1]["error"]["code"] == "handoff_failed"
    assert "[DONE]" not in chunks
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "script", [lambda request: [RuntimeError("secret")], lambda request: []], ids=["bug", "silent"]
)
async def test_a_fault_of_our_own_is_a_500_that_tells_nothing(serve: Serve, script: Any, stream: bool) -> None:
    served = await serve(script)
    status, answer = await served.complete(stream=stream)
    assert (status, answer["error"]["type"]) == (500, "server_error")
    assert "secret" not in json.dumps(answer)


async def test_usage_in_a_stream(serve: Serve) -> None:
    served = await serve("the fox")
    plain = await events(served, "/v1/completions", prompt="x")
    assert all("usage" not in chunk for chunk in plain[:-1])
    once = await events(served, "/v1/completions", prompt="x", stream_options={"include_usage": True})
    assert [chunk["usage"] is None for chunk in once[:-1]] == [True] * (len(once) - 2) + [False]
    assert once[-2]["choices"] == []
    options = {"include_usage": True, "continuous_usage_stats": True}
    always = await events(served, "/v1/completions", prompt="x", stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in always[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == served.generator.num_yielded / 3


async def test_echo_in_a_stream_comes_once_and_first(serve: Serve) -> None:
    served = await serve(" fox")
    chunks = await events(served, "/v1/completions", prompt="the", echo=True)
    assert chunks[0]["choices"][0]["text"] == "the"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks[:-1]) == "the fox"


async def test_every_token_with_logprobs_is_told_even_without_text(serve: Serve) -> None:
    served = await serve("🦊")
    chunks = await events(served, "/v1/completions", prompt="x", logprobs=1)
    tokens = [token for chunk in chunks[:-1] for token in (chunk["choices"][0]["logprobs"] or {"tokens": []})["tokens"]]
    assert len(tokens) == served.generator.num_yielded


async def test_minus_infinity_is_json(serve: Serve) -> None:
    def script(request: GenerateRequest) -> list[TokenOutput]:
        (output,) = outputs_of(request, [2])
        logprobs = msgspec.structs.replace(output.logprobs[0], top=((2, 0.0), (3, float("-inf"))))
        return [msgspec.structs.replace(output, logprobs=(logprobs,))]

    served = await serve(script)
    _, answer = await served.chat(logprobs=True, top_logprobs=2)
    assert answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"][1]["logprob"] == -9999.0


async def test_messages_of_parts_and_of_developers(serve: Serve) -> None:
    served = await serve()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    status, _ = await served.chat(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": None, "audio": None},
            {"role": "assistant", "content": "The fo"},
        ],
        continue_final_message=True,
    )
    assert status == 200
    assert served.text.vocabulary.decode(served.generator.requests[0].prompt) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none\ntwo<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\nThe fo"
    )


async def test_bos_goes_before_a_plain_prompt_only_where_the_model_wants_it(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve()
    monkeypatch.setattr(served.text, "config", msgspec.structs.replace(served.text.config, add_bos=True))
    await served.complete()
    await served.complete(add_special_tokens=False)
    await served.complete(prompt=[7])
    await served.chat()
    starts = [request.prompt[0] for request in served.generator.requests]
    assert starts[0] == 0
    assert starts[1] != 0
    assert starts[2:] == [7, 1]


async def test_a_finish_reason_of_the_engine_is_passed_on(serve: Serve) -> None:
    served = await serve(lambda request: outputs_of(request, [300], finish=FinishReason.LENGTH))
    _, answer = await served.complete()
    assert answer["choices"][0]["finish_reason"] == "length"
