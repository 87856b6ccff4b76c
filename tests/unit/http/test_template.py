from __future__ import annotations

from typing import Any

import pytest
from http_fakes import CHAT_TEMPLATE
from transformers.utils import chat_template_utils

from pdd.base.errors import BadRequest, ModelInvalid
from pdd.http.template import ChatTemplate

LLAMA2 = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + message['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
FEATURES = """
{%- set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
    {% set ns.count = ns.count + 1 %}
    {% generation %}{{ message | tojson }}{% endgeneration %}

    {%- if ns.count > 1 %}{% break %}{% endif %}
{% endfor %}
{{ tools is none }} {{ flavour | default('plain') }} {{ pad_token is defined }} {{ 'é<&' | tojson(indent=2) }}
"""
render_jinja_template: Any = chat_template_utils.render_jinja_template
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "user", "content": " What? "},
    {"role": "assistant", "content": "A <fox> & co "},
]


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LLAMA2, FEATURES], ids=["chatml", "llama2", "features"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_as_transformers_does(source: str, add_generation_prompt: bool) -> None:
    rendered, _ = render_jinja_template(
        [MESSAGES], chat_template=source, add_generation_prompt=add_generation_prompt, flavour="sour", **SPECIAL
    )
    ours = ChatTemplate(source, SPECIAL).render(
        MESSAGES, add_generation_prompt=add_generation_prompt, variables={"flavour": "sour"}
    )
    assert ours == rendered[0]


@pytest.mark.parametrize("source", [CHAT_TEMPLATE, LLAMA2], ids=["chatml", "llama2"])
def test_continues_as_transformers_does(source: str) -> None:
    rendered, _ = render_jinja_template([MESSAGES], chat_template=source, continue_final_message=True, **SPECIAL)
    assert ChatTemplate(source, SPECIAL).render_continued(MESSAGES, variables={}) == rendered[0]


def test_a_refusal_by_the_template_is_the_clients_fault() -> None:
    with pytest.raises(BadRequest, match="roles must alternate"):
        ChatTemplate(LLAMA2, SPECIAL).render(MESSAGES[1:], add_generation_prompt=True, variables={})


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].content.__class__.__mro__ }}", "{{ raise_exception.__globals__['json'] }}", "{{ 1 / 0 }}"],
)
def test_the_sandbox_holds(source: str) -> None:
    with pytest.raises(BadRequest):
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True, variables={})


@pytest.mark.parametrize("name", ["messages", "bos_token", "add_generation_prompt"])
def test_variables_cannot_replace_what_the_server_sets(name: str) -> None:
    with pytest.raises(BadRequest, match=name):
        ChatTemplate(CHAT_TEMPLATE, SPECIAL).render(MESSAGES, add_generation_prompt=True, variables={name: "x"})


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    template = ChatTemplate("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", {})
    with pytest.raises(BadRequest, match="cannot be continued"):
        template.render_continued(MESSAGES, variables={})


def test_a_broken_template_is_the_models_fault() -> None:
    with pytest.raises(ModelInvalid, match="cannot be compiled"):
        ChatTemplate("{% for %}", {})
