"""Messages to prompt text: the model's own Jinja chat template, run in a sandbox.

Templates are written for transformers' `apply_chat_template`; the environment here offers what that one documents:
trimmed blocks, loop controls, `raise_exception`, `strftime_now`, `tojson`, and the special tokens by name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pdd.base.errors import BadRequest, ModelInvalid

_CONTINUE_HERE = "\ue000continue here\ue000"
"""Stands at the end of a message that the model is to continue; private use characters, refused in messages."""


class ChatTemplate:
    """Raises ModelInvalid when `source` is no template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        self._special_tokens = dict(special_tokens)
        self.knows_developer = "developer" in source
        """Whether messages of the role `developer` are written as such; else they are the system's."""
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ModelInvalid(f"the model's chat template cannot be compiled: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The prompt that ends where the model's answer begins. Raises BadRequest where the template refuses."""
        reserved = {"messages", "tools", "documents", "add_generation_prompt", *self._special_tokens} & set(variables)
        if reserved:
            raise BadRequest(f"chat_template_kwargs cannot set {sorted(reserved)[0]!r}.", "chat_template_kwargs")
        try:
            return self._template.render(
                **self._special_tokens,
                **variables,
                messages=[dict(message) for message in messages],
                tools=None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
            )
        except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, RecursionError) as error:
            raise BadRequest(f"The model's chat template refuses these messages: {error}", "messages") from error

    def render_continued(self, messages: Sequence[Mapping[str, str]], *, variables: Mapping[str, Any]) -> str:
        """The prompt that ends inside the last message, right after its content."""
        *earlier, last = messages
        content = last["content"]
        marked = [*earlier, {**last, "content": content + _CONTINUE_HERE + " "}]
        text = self.render(marked, add_generation_prompt=False, variables=variables)
        prompt, mark, rest = text.rpartition(_CONTINUE_HERE)
        if not rest.startswith(" "):  # the template trims what it is given, so the content's own end is trimmed too
            prompt = prompt.rstrip()
        if not mark or text.count(_CONTINUE_HERE) != 1 or not prompt.rstrip().endswith(content.strip()):
            raise BadRequest(
                "The model's chat template rewrites the final message, so that it cannot be continued.",
                "continue_final_message",
            )
        return prompt


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's own words for training; for a prompt it means nothing."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(format_: str) -> str:
    return datetime.now().strftime(format_)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own filter escapes HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
