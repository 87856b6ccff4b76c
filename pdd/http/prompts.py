"""From a checked body to token ids: the first work that is done for a request, in a thread of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from pdd.base.errors import BadRequest
from pdd.http.requests import ChatBody, CompletionBody, Message
from pdd.http.text import Text
from pdd.http.vocabulary import Vocabulary

ROLES = ("system", "developer", "user", "assistant")


class Prompt(msgspec.Struct, frozen=True):
    tokens: tuple[int, ...]
    text: str
    """What `echo` gives back; empty where that is not asked for."""


def chat_texts(body: ChatBody) -> Iterator[str]:
    """The texts of a conversation as they came, unchecked."""
    for message in body.messages:
        parts = [] if message.content is None or isinstance(message.content, str) else message.content
        yield from (part.text for part in parts if part.text is not None)
        if isinstance(message.content, str):
            yield message.content


def completion_texts(body: CompletionBody) -> Iterator[str]:
    """The prompts that are texts, unchecked."""
    prompts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    yield from (prompt for prompt in prompts if isinstance(prompt, str))


def chat_prompt(body: ChatBody, text: Text) -> Prompt:
    """Raises BadRequest for messages that cannot be put into the model's template."""
    if body.continue_final_message and body.add_generation_prompt:
        raise BadRequest("Set only one of add_generation_prompt and continue_final_message.", "continue_final_message")
    tokens = text.encode_chat(
        [_template_message(index, message, text) for index, message in enumerate(body.messages)],
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final_message=bool(body.continue_final_message),
        variables=body.chat_template_kwargs or {},
    )
    return Prompt(_not_empty(tokens, "messages"), "")


def completion_prompts(body: CompletionBody, text: Text) -> list[Prompt]:
    """One Prompt for each that the client gave. Raises BadRequest for empty ones and for ids that no token has."""
    match body.prompt:
        case str(single):
            return [_text_prompt(single, "prompt", body, text)]
        case []:
            raise BadRequest("The prompt is empty.", "prompt")
        case [str(), *_] as texts if all(isinstance(one, str) for one in texts):
            return [_text_prompt(one, f"prompt[{index}]", body, text) for index, one in enumerate(texts)]
        case [list(), *_] as prompts if all(isinstance(one, list) for one in prompts):
            return [_token_prompt(one, f"prompt[{index}]", body, text) for index, one in enumerate(prompts)]
        case tokens:
            return [_token_prompt(tokens, "prompt", body, text)]


def check_token_ids(tokens: list[Any], param: str, vocabulary: Vocabulary) -> None:
    """Raises BadRequest unless every entry is an id of the vocabulary."""
    for index, token in enumerate(tokens):
        if type(token) is not int:
            raise BadRequest(f"Invalid value for '{param}[{index}]': expected a token id, got {token!r:.40}.", param)
        if not 0 <= token < vocabulary.size:
            raise BadRequest(
                f"Invalid value for '{param}[{index}]': token id {token!r:.40} is not in the vocabulary"
                f" (0 to {vocabulary.size - 1}).",
                param,
            )


def _text_prompt(prompt: str, param: str, body: CompletionBody, text: Text) -> Prompt:
    if not prompt:
        raise BadRequest("The prompt is empty.", param)
    tokens = text.encode(prompt, add_special_tokens=body.add_special_tokens is not False)
    return Prompt(_not_empty(tokens, param), prompt if body.echo else "")


def _token_prompt(tokens: list[Any], param: str, body: CompletionBody, text: Text) -> Prompt:
    check_token_ids(tokens, param, text.vocabulary)
    return Prompt(_not_empty(tokens, param), text.vocabulary.decode(tokens) if body.echo else "")


def _not_empty(tokens: list[int], param: str) -> tuple[int, ...]:
    if not tokens:
        raise BadRequest("The prompt has no tokens.", param)
    return tuple(tokens)


def _template_message(index: int, message: Message, text: Text) -> dict[str, str]:
    """A message as templates know it: role, content, and what else the client gave."""
    at = f"messages[{index}]"
    if message.tool_calls or message.role in ("tool", "function"):
        raise BadRequest("Tool calls are not supported by this server.", f"{at}.role")
    if message.role not in ROLES:
        raise BadRequest(f"Invalid value for '{at}.role': expected one of {', '.join(ROLES)}.", f"{at}.role")
    role = message.role
    if role == "developer" and text.template is not None and not text.template.knows_developer:
        role = "system"
    extras = {"name": message.name, "reasoning_content": message.reasoning_content}
    return {
        "role": role,
        "content": _content(at, message),
        **{name: value for name, value in extras.items() if value is not None},
    }


def _content(at: str, message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        if message.role == "assistant":
            return message.refusal or ""
        raise BadRequest(f"Missing required parameter: '{at}.content'.", f"{at}.content")
    texts = []
    for number, part in enumerate(message.content):
        if part.type != "text":
            param = f"{at}.content[{number}].type"
            raise BadRequest(f"Content of type {part.type!r:.40} is not supported: this model reads text.", param)
        if part.text is None:
            raise BadRequest(
                f"Missing required parameter: '{at}.content[{number}].text'.", f"{at}.content[{number}].text"
            )
        texts.append(part.text)
    return "\n".join(texts)
