"""How the answer's tokens shall be chosen: what the client asked, completed by the model's own defaults."""

from __future__ import annotations

import hashlib
import secrets
from typing import TypeVar

import msgspec

from pdd.base.errors import BadRequest, ContextTooLong
from pdd.engine.config import TextConfig
from pdd.http.prompts import check_token_ids
from pdd.http.requests import GenerationBody
from pdd.http.vocabulary import Vocabulary
from pdd.lifecycle.request import SamplingParams

Value = TypeVar("Value")
SEED_BITS = 64


def sampling_params(
    body: GenerationBody, *, max_tokens: int, num_logprobs: int | None, defaults: TextConfig, vocabulary: Vocabulary
) -> SamplingParams:
    """Parameters without a seed (see `seeded`). Raises BadRequest for values that do not fit model or each other."""
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise BadRequest(f"min_tokens is {min_tokens}, but at most {max_tokens} tokens can come.", "min_tokens")
    stop_token_ids = body.stop_token_ids or []
    check_token_ids(stop_token_ids, "stop_token_ids", vocabulary)
    end_of_sequence = () if body.ignore_eos else defaults.eos_token_ids
    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        temperature=_first(body.temperature, defaults.temperature, 1.0),
        top_p=_first(body.top_p, defaults.top_p, 1.0),
        top_k=max(_first(body.top_k, defaults.top_k, 0), 0),
        min_p=_first(body.min_p, None, 0.0),
        frequency_penalty=_first(body.frequency_penalty, None, 0.0),
        presence_penalty=_first(body.presence_penalty, None, 0.0),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=_logit_bias(body.logit_bias or {}, vocabulary),
        stop_token_ids=tuple(dict.fromkeys((*end_of_sequence, *stop_token_ids))),
        num_logprobs=num_logprobs,
    )


def seeded(params: SamplingParams, seed: int | None, choice: int) -> SamplingParams:
    """`params` for one of `n` choices: the client's seed gives each the same answer again, no seed a new one."""
    if seed is None:
        return msgspec.structs.replace(params, seed=secrets.randbits(SEED_BITS))
    seed %= 2**SEED_BITS
    if choice:
        digest = hashlib.blake2b(f"{seed}/{choice}".encode(), digest_size=SEED_BITS // 8)
        seed = int.from_bytes(digest.digest(), "little")
    return msgspec.structs.replace(params, seed=seed)


def answer_tokens(
    num_prompt_tokens: int, *, asked: int | None, default: int | None, max_sequence_tokens: int, param: str
) -> int:
    """Most tokens that the answer may have. Raises ContextTooLong when prompt and answer do not fit a sequence.

    `asked` is the client's number and must fit; `default` (None: all that is left) shrinks to what is left.
    """
    left = max_sequence_tokens - num_prompt_tokens
    if left < 1:
        raise ContextTooLong(
            f"This model's maximum context length is {max_sequence_tokens} tokens, but your prompt has"
            f" {num_prompt_tokens} tokens, which leaves no room for an answer. Please shorten the prompt.",
            param,
        )
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise ContextTooLong(
            f"This model's maximum context length is {max_sequence_tokens} tokens. However, you requested"
            f" {num_prompt_tokens + asked} tokens ({num_prompt_tokens} in the prompt, {asked} in the completion)."
            " Please shorten the prompt or the completion.",
            param,
        )
    return asked


def _first(asked: Value | None, of_model: Value | None, otherwise: Value) -> Value:
    if asked is not None:
        return asked
    return otherwise if of_model is None else of_model


def _logit_bias(biases: dict[str, float], vocabulary: Vocabulary) -> dict[int, float]:
    """Keys are token ids written as text, as JSON has no others."""
    result = {}
    for key, bias in biases.items():
        # isdecimal() alone would take the digits of every script, and int() refuses numbers of thousands of digits
        if not (key.isascii() and key.isdecimal() and len(key) < 20 and int(key) < vocabulary.size):
            ids = f"0 to {vocabulary.size - 1}"
            raise BadRequest(f"Invalid key in 'logit_bias': {key!r:.40} is not a token id ({ids}).", "logit_bias")
        result[int(key)] = bias
    return result
