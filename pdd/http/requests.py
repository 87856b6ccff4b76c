"""What clients may write: the bodies of the OpenAI API, read strictly, before anything is done with them.

A field that pdd does not know is refused by name. Fields that OpenAI knows and pdd does not serve are of two kinds:
those that cannot change the answer are dropped (`IGNORED`), and the others are refused unless they ask for nothing
(`ONLY`). Extras beyond OpenAI's fields have vLLM's names and meanings.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from pdd.base.errors import BadRequest

MAX_STOP_STRINGS = 16
MAX_CHOICES = 16
MAX_LOGPROBS = 20

IGNORED = frozenset(
    {
        "cache_salt",
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

ONLY: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None,),
    "audio": (None,),
    "bad_words": (None, []),
    "chat_template": (None,),
    "documents": (None, []),
    "function_call": (None, "none"),
    "functions": (None, []),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "modalities": (None, ["text"]),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "spaces_between_special_tokens": (None, True),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none"),
    "tools": (None, []),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
"""Fields of which only these values are accepted."""

Flag = bool | None
Count = Annotated[int, Meta(ge=0)] | None
StopString = Annotated[str, Meta(min_length=1, max_length=1024)]


class StreamOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    include_usage: Flag = None
    continuous_usage_stats: Flag = None
    include_obfuscation: Flag = None
    """Accepted and not done: chunks are not padded."""


class GenerationBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both endpoints share. None always means: as if it were not there."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Count = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    """-1 and 0 both keep the whole vocabulary."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    seed: int | None = None
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=100)] | None = None
    logit_bias: dict[str, Annotated[float, Meta(ge=-100, le=100)]] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[int], Meta(max_length=1024)] | None = None
    ignore_eos: Flag = None
    skip_special_tokens: Flag = None
    include_stop_str_in_output: Flag = None
    stream: Flag = None
    stream_options: StreamOptions | None = None

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class CompletionBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    prompt: str | list[Any]
    """A text, texts, token ids, or lists of token ids."""
    best_of: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    echo: Flag = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_special_tokens: Flag = None


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a message; what other fields there are depends on `type`, of which only text is served."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: Annotated[list[Any], Meta(max_length=0)] | None = None


class ChatBody(GenerationBody, frozen=True, kw_only=True, forbid_unknown_fields=True):
    messages: Annotated[list[Message], Meta(min_length=1)]
    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: Flag = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """/tokenize of a plain text; with `messages` it takes a ChatBody."""

    prompt: str
    model: str | None = None
    add_special_tokens: Flag = None


class DetokenizeBody(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


Body = TypeVar("Body", bound=msgspec.Struct)


def read_object(raw: bytes) -> dict[str, Any]:
    """The JSON object in a request's body; raises BadRequest when it holds anything else."""
    try:
        value = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"We could not parse the JSON body of your request: {error}.") from error
    except RecursionError:
        raise BadRequest("We could not parse the JSON body of your request: it is nested too deeply.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body of your request must be a JSON object.")
    return value


def read_body(fields: dict[str, Any], body: type[Body]) -> Body:
    """`fields` as a `body`; raises BadRequest that names the first field at fault."""
    known = {field.encode_name for field in msgspec.structs.fields(body)}
    kept = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in ONLY:
            _check_only(name, value)
        elif name not in IGNORED:
            raise BadRequest(f"Unrecognized request argument supplied: {name}", name)
    try:
        return msgspec.convert(kept, body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from error


def _check_only(name: str, value: Any) -> None:
    if value not in ONLY[name]:
        harmless = msgspec.json.encode(ONLY[name][-1]).decode()
        raise BadRequest(f"{name!r} is not supported by this server; leave it out, or set it to {harmless}.", name)


def _explain(complaint: str) -> BadRequest:
    """msgspec's sentence (`<what> - at `$.<path>``) in the API's terms, with the path as `param`."""
    what, _, where = complaint.partition(" - at `$")
    path = where.removesuffix("`").removeprefix(".").replace("[...]", "")
    if unknown := re.search(r"unknown field `(.*)`", what):
        name = f"{path}.{unknown[1]}" if path else unknown[1]
        return BadRequest(f"Unrecognized request argument supplied: {name}", name)
    if missing := re.search(r"missing required field `(.*)`", what):
        name = f"{path}.{missing[1]}" if path else missing[1]
        return BadRequest(f"Missing required parameter: '{name}'.", name)
    return BadRequest(f"Invalid value for '{path}': {what[0].lower()}{what[1:]}.", path or None)
