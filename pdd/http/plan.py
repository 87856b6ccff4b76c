"""One HTTP request, made ready: everything that can be wrong with it has been found when its Plan exists."""

from __future__ import annotations

import msgspec

from pdd.base.errors import BadRequest, ContextTooLong, ModelNotFound
from pdd.base.ids import RequestId, new_request_id
from pdd.http.choice import TextOptions
from pdd.http.prompts import Prompt, chat_prompt, chat_texts, completion_prompts, completion_texts
from pdd.http.requests import ChatBody, CompletionBody, GenerationBody, StreamOptions
from pdd.http.responses import ChatFormat, Format, TextFormat
from pdd.http.sampling import answer_tokens, sampling_params, seeded
from pdd.http.text import Text
from pdd.lifecycle.request import GenerateRequest

DEFAULT_COMPLETION_TOKENS = 16
"""What OpenAI's /v1/completions generates when the client names no number."""
MAX_SEQUENCES = 128
"""Most sequences of one HTTP request: prompts times choices."""


class ServedModel(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    """What clients write in `model`."""
    text: Text
    max_sequence_tokens: int
    """Prompt and answer together: the least of what the model was trained for, what the operator allows and what a
    replica's KV memory holds."""

    def check_size(self, text: str, param: str) -> None:
        """Raises ContextTooLong for a text that no tokenizing could make fit: that is known without doing it."""
        least = len(text) // self.text.vocabulary.max_piece_bytes
        if least > self.max_sequence_tokens:
            raise ContextTooLong(
                f"This model's maximum context length is {self.max_sequence_tokens} tokens. Your text of {len(text)} "
                f"characters has at least {least} tokens. Please shorten it.",
                param,
            )

    def check_name(self, name: str) -> None:
        if name != self.name:
            raise ModelNotFound(f"The model {name!r:.200} does not exist; this server has {self.name!r}.")


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    id: RequestId
    prompts: tuple[tuple[GenerateRequest, ...], ...]
    """For each prompt its choices."""
    text: TextOptions
    format: Format
    stream: bool
    usage: StreamOptions
    """Which chunks of a stream tell usage."""

    @property
    def num_sequences(self) -> int:
        return sum(len(choices) for choices in self.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """Each prompt once, as it is computed once."""
        return sum(len(choices[0].prompt) for choices in self.prompts)


def plan_chat(body: ChatBody, model: ServedModel) -> Plan:
    """Raises BadRequest. Takes as long as tokenizing takes: not for an event loop."""
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise BadRequest("max_tokens and max_completion_tokens differ; set only one of them.", "max_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise BadRequest("'top_logprobs' is only allowed when 'logprobs' is true.", "top_logprobs")
    for text in chat_texts(body):
        model.check_size(text, "messages")
    return _plan(
        body,
        model,
        [chat_prompt(body, model.text)],
        param="messages",
        asked_tokens=body.max_completion_tokens or body.max_tokens,
        default_tokens=None,
        num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        format_=ChatFormat(model.text.vocabulary, logprobs=bool(body.logprobs)),
    )


def plan_completion(body: CompletionBody, model: ServedModel) -> Plan:
    """Raises BadRequest. Takes as long as tokenizing takes: not for an event loop."""
    num_choices = body.n or 1
    if body.best_of is not None and body.best_of != num_choices:
        raise BadRequest("best_of other than n is not supported by this server.", "best_of")
    if body.echo and body.logprobs is not None:
        raise BadRequest("echo together with logprobs is not supported: prompts have no logprobs here.", "logprobs")
    for text in completion_texts(body):
        model.check_size(text, "prompt")
    prompts = completion_prompts(body, model.text)
    return _plan(
        body,
        model,
        prompts,
        param="prompt",
        asked_tokens=body.max_tokens,
        default_tokens=DEFAULT_COMPLETION_TOKENS,
        num_logprobs=body.logprobs,
        format_=TextFormat(
            model.text.vocabulary,
            logprobs=body.logprobs is not None,
            echoes=[prompt.text for prompt in prompts for _ in range(num_choices)],
        ),
    )


def _plan(
    body: GenerationBody,
    model: ServedModel,
    prompts: list[Prompt],
    *,
    param: str,
    asked_tokens: int | None,
    default_tokens: int | None,
    num_logprobs: int | None,
    format_: Format,
) -> Plan:
    if body.stream_options is not None and not body.stream:
        raise BadRequest("'stream_options' is only allowed when 'stream' is true.", "stream_options")
    num_choices = body.n or 1
    if len(prompts) * num_choices > MAX_SEQUENCES:
        raise BadRequest(
            f"{len(prompts)} prompts with {num_choices} choices each are more than {MAX_SEQUENCES} sequences.", param
        )
    request_id = new_request_id(format_.id_prefix)
    planned = []
    for number, prompt in enumerate(prompts):
        params = sampling_params(
            body,
            max_tokens=answer_tokens(
                len(prompt.tokens),
                asked=asked_tokens,
                default=default_tokens,
                max_sequence_tokens=model.max_sequence_tokens,
                param=param,
            ),
            num_logprobs=num_logprobs,
            defaults=model.text.config,
            vocabulary=model.text.vocabulary,
        )
        planned.append(
            tuple(
                GenerateRequest(
                    id=_sequence_id(request_id, number * num_choices + choice),
                    prompt=prompt.tokens,
                    sampling=seeded(params, body.seed, choice),
                )
                for choice in range(num_choices)
            )
        )
    return Plan(
        id=request_id,
        prompts=tuple(planned),
        text=TextOptions(
            stop=body.stop_strings,
            include_stop=bool(body.include_stop_str_in_output),
            skip_special_tokens=body.skip_special_tokens is not False,
            min_tokens=body.min_tokens or 0,
        ),
        format=format_,
        stream=bool(body.stream),
        usage=body.stream_options or StreamOptions(),
    )


def _sequence_id(request: RequestId, index: int) -> RequestId:
    """The first sequence has the id that the client sees; the others tell which they are."""
    return RequestId(f"{request}-{index}") if index else request
