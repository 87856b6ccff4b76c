"""The model's text side as the HTTP floor uses it: prompts in, pieces of answers out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdd.base.errors import BadRequest
from pdd.engine.config import TextConfig
from pdd.http.template import ChatTemplate
from pdd.http.vocabulary import ByteVocabulary, TokenizerVocabulary, Vocabulary


class Text:
    """One model's vocabulary, chat template and special tokens. Stateless, so threads may share it."""

    def __init__(self, config: TextConfig, vocabulary: Vocabulary) -> None:
        self.config = config
        self.vocabulary = vocabulary
        named = {"bos_token": config.bos_token, "eos_token": config.eos_token}
        special = {name: token for name, token in named.items() if token is not None}
        self.template = None if config.chat_template is None else ChatTemplate(config.chat_template, special)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a plain prompt, with the beginning-of-sequence token where the model wants one."""
        tokens = self.vocabulary.encode(text)
        if add_special_tokens and self.config.add_bos and self.config.bos_token_id is not None:
            return [self.config.bos_token_id, *tokens]
        return tokens

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, str]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool,
        variables: Mapping[str, Any],
    ) -> list[int]:
        """Token ids of a conversation; the template itself writes every special token."""
        if self.template is None:
            raise BadRequest("This model has no chat template; use /v1/completions.", "messages")
        if continue_final_message:
            text = self.template.render_continued(messages, variables=variables)
        else:
            text = self.template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        return self.vocabulary.encode(text)


def open_text(config: TextConfig, *, tokenizer_file: Path, vocab_size: int) -> Text:
    """The text side of a packed model; raises ModelInvalid when its tokenizer or template is no good.

    `vocab_size` is the network's: some networks have more rows than the tokenizer has tokens.
    """
    if config.kind == "toy":
        return Text(config, ByteVocabulary(vocab_size))
    return Text(config, TokenizerVocabulary.open(tokenizer_file, vocab_size))
