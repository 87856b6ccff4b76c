"""Tokenizer, special tokens, chat template and sampling defaults of a Hugging Face directory, as a TextConfig."""

from __future__ import annotations

from pathlib import Path

import msgspec
from tokenizers import Tokenizer

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig, TextConfig
from pdd.engine.weights.json_file import read_json, read_optional_json
from pdd.engine.weights.tokenizer_checks import building, check_vocabulary

FILES = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
)


class _AddedToken(msgspec.Struct):
    content: str


class _Template(msgspec.Struct):
    name: str
    template: str


class _TokenizerConfig(msgspec.Struct):
    """Of `tokenizer_config.json`, or (the two tokens only) of the older `special_tokens_map.json`."""

    bos_token: str | _AddedToken | None = None
    eos_token: str | _AddedToken | None = None
    add_bos_token: bool | None = None
    chat_template: str | list[_Template] | None = None


class _Ids(msgspec.Struct):
    """Of `config.json` or `generation_config.json`."""

    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None


class _Generation(_Ids):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None


def read_tokenizer(directory: Path, config: ModelConfig) -> Tokenizer | None:
    """`tokenizer.json` without truncation and padding, which would silently shorten prompts; None where it is absent.
    Raises ModelInvalid for a damaged one, and for one that knows tokens which the network has no embedding of."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    with building(str(path)):
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    check_vocabulary(tokenizer, config, str(path))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def read_text(directory: Path, config: ModelConfig, tokenizer: Tokenizer | None) -> TextConfig:
    """Raises ModelInvalid for damaged files and for special tokens outside the vocabulary."""
    own = read_json(directory / "config.json", _Ids)
    generation = read_optional_json(directory / "generation_config.json", _Generation)
    stated = read_optional_json(directory / "tokenizer_config.json", _TokenizerConfig)
    mapped = read_optional_json(directory / "special_tokens_map.json", _TokenizerConfig)
    bos_token = _content(stated.bos_token or mapped.bos_token)
    eos_token = _content(stated.eos_token or mapped.eos_token)
    bos_ids = [*_ids_of(tokenizer, bos_token), *_listed(own.bos_token_id), *_listed(generation.bos_token_id)]
    eos_ids = [*_listed(generation.eos_token_id), *_listed(own.eos_token_id), *_ids_of(tokenizer, eos_token)]
    for token_id in bos_ids + eos_ids:
        if not 0 <= token_id < config.vocab_size:
            raise ModelInvalid(f"{directory}: special token id {token_id}, but vocab_size is {config.vocab_size}")
    bos_id = bos_ids[0] if bos_ids else None
    return TextConfig(
        kind="tokenizer" if tokenizer else "toy",
        bos_token_id=bos_id,
        eos_token_ids=tuple(dict.fromkeys(eos_ids)),
        add_bos=bos_id is not None and _adds_bos(stated, tokenizer, bos_id),
        bos_token=bos_token or _spelling(tokenizer, bos_ids),
        eos_token=eos_token or _spelling(tokenizer, eos_ids),
        chat_template=_chat_template(directory, stated),
        temperature=generation.temperature,
        top_p=generation.top_p,
        top_k=generation.top_k,
        repetition_penalty=generation.repetition_penalty,
    )


def _chat_template(directory: Path, stated: _TokenizerConfig) -> str | None:
    """The file of its own comes first; of several named templates, the one called default."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelInvalid(f"{path}: {error}; fetch the model again") from error
    if isinstance(stated.chat_template, list):
        templates = {each.name: each.template for each in stated.chat_template}
        return templates.get("default", next(iter(templates.values()), None))
    return stated.chat_template


def _adds_bos(stated: _TokenizerConfig, tokenizer: Tokenizer | None, bos_id: int) -> bool:
    """As the configuration says; where it is silent, as the tokenizer's own post-processor does."""
    if stated.add_bos_token is not None:
        return stated.add_bos_token
    return tokenizer is not None and tokenizer.encode("").ids[:1] == [bos_id]


def _content(token: str | _AddedToken | None) -> str | None:
    return token.content if isinstance(token, _AddedToken) else token


def _listed(ids: int | list[int] | None) -> list[int]:
    return [] if ids is None else [ids] if isinstance(ids, int) else ids


def _ids_of(tokenizer: Tokenizer | None, token: str | None) -> list[int]:
    token_id = tokenizer.token_to_id(token) if tokenizer and token is not None else None
    return [] if token_id is None else [token_id]


def _spelling(tokenizer: Tokenizer | None, ids: list[int]) -> str | None:
    return tokenizer.id_to_token(ids[0]) if tokenizer and ids else None
