"""The tokenizer that a GGUF file describes in its metadata, as a Hugging Face `Tokenizer`.

Two families: byte-level BPE ("gpt2": vocabulary, merges and the name of a rule that cuts text into words) and
SentencePiece BPE ("llama": vocabulary with scores, from which the merges follow). The rules are those of llama.cpp's
`tokenizer.ggml.pre` names; where llama.cpp only approximates a model's own tokenizer.json, the latter is followed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE

from pdd.base.errors import ModelInvalid
from pdd.engine.config import ModelConfig, TextConfig
from pdd.engine.weights.gguf_file import GgufFile
from pdd.engine.weights.tokenizer_checks import building

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
"""Of `tokenizer.ggml.token_type`."""
_MAX_TOKEN_CHARACTERS = 1024
"""Finding the merges of a token takes the square of its length."""

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")
_WORDS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2_WORDS,),
    "smollm": (r"\p{N}", _GPT2_WORDS),
    "llama-bpe": (_LLAMA3_WORDS,),
    "qwen2": (_QWEN2_WORDS,),
    "deepseek-r1-qwen": (_QWEN2_WORDS,),
}
"""Cuts, one after the other, by the file's `tokenizer.ggml.pre`."""
_ANSWER_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>")
"""Control tokens that end an answer whether or not the file lists them: a file names one end only, and of some chat
models it is the wrong one."""


def build_tokenizer(file: GgufFile) -> Tokenizer:
    """Encodes without adding special tokens. Raises ModelInvalid for a kind that pdd does not know, or damage."""
    kind = file.value("tokenizer.ggml.model", str)
    tokens = _strings(file, "tokenizer.ggml.tokens")
    types = [int(kind) for kind in _numbers(file, "tokenizer.ggml.token_type", [_NORMAL] * len(tokens))]
    if len(types) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ModelInvalid(f"{file.path}: the vocabulary has {len(types)} types and {len(set(tokens))} distinct tokens "
                           f"for {len(tokens)} tokens; fetch the file again")  # fmt: skip
    with building(str(file.path)):
        match kind:
            case "gpt2":
                tokenizer = _byte_level(file, tokens)
            case "llama":
                tokenizer = _sentencepiece(file, tokens, types)
            case _:
                raise ModelInvalid(f"{file.path}: tokenizer.ggml.model is {kind!r}; pdd builds gpt2 and llama")
    tokenizer.add_special_tokens(_added(tokens, types, _CONTROL))
    tokenizer.add_tokens(_added(tokens, types, _USER_DEFINED))
    return tokenizer


def read_text(file: GgufFile, config: ModelConfig) -> TextConfig:
    """Raises ModelInvalid for special tokens outside the vocabulary."""
    tokens = _strings(file, "tokenizer.ggml.tokens")
    bos_id = _token_id(file, "bos", tokens)
    stated = [_token_id(file, name, tokens) for name in ("eos", "eot", "eom")]
    types = _numbers(file, "tokenizer.ggml.token_type", [])
    ends = [index for index, kind in enumerate(types) if kind == _CONTROL and tokens[index] in _ANSWER_ENDS]
    eos_ids = tuple(dict.fromkeys([*(token_id for token_id in stated if token_id is not None), *ends]))
    begins = file.value("tokenizer.ggml.model", str) == "llama" or _rule(file) == "llama-bpe"
    return TextConfig(
        kind="tokenizer",
        bos_token_id=bos_id,
        eos_token_ids=eos_ids,
        add_bos=bos_id is not None and file.value("tokenizer.ggml.add_bos_token", bool, begins),
        bos_token=None if bos_id is None else tokens[bos_id],
        eos_token=tokens[eos_ids[0]] if eos_ids else None,
        chat_template=file.value("tokenizer.chat_template", str, "") or None,
    )


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    rule = _rule(file)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [_pair(file.path, merge, vocabulary) for merge in _strings(file, "tokenizer.ggml.merges")]
    # Llama 3 takes a word that is a token whole, even where no merges lead to it.
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges, ignore_merges=rule == "llama-bpe"))
    cuts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _WORDS[rule]]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    if _WORDS[rule] == (_QWEN2_WORDS,):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GgufFile, tokens: list[str], types: list[int]) -> Tokenizer:
    scores = _numbers(file, "tokenizer.ggml.scores", [])
    if len(scores) != len(tokens):
        raise ModelInvalid(f"{file.path}: {len(scores)} scores for {len(tokens)} tokens; fetch the file again")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    mergeable = [token for token, kind in zip(tokens, types, strict=True) if kind in (_NORMAL, _USER_DEFINED)]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    merges = _merges(file.path, mergeable, vocabulary, scores)
    model = BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(model)
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    scheme = "first" if prefix else "never"
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    decoder = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)] if prefix else decoder)
    return tokenizer


def _merges(
    path: Path, mergeable: Sequence[str], vocabulary: dict[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """SentencePiece joins the neighbours whose union scores highest; as BPE ranks that is every split of every token
    into two tokens, the highest score first, a token's own splits by their parts' ids."""
    known = set(mergeable)
    ranked: list[tuple[float, int, int, int]] = []
    for token in mergeable:
        if len(token) > _MAX_TOKEN_CHARACTERS:
            raise ModelInvalid(f"{path}: a token of {len(token)} characters; the file is damaged, fetch it again")
        index = vocabulary[token]
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in known and right in known:
                ranked.append((-scores[index], index, vocabulary[left], vocabulary[right]))
    ranked.sort()
    tokens = list(vocabulary)
    return [(tokens[left], tokens[right]) for _, _, left, right in ranked]


def _rule(file: GgufFile) -> str:
    rule = file.value("tokenizer.ggml.pre", str, "default")
    if file.value("tokenizer.ggml.model", str) == "gpt2" and rule not in _WORDS:
        raise ModelInvalid(f"{file.path}: tokenizer.ggml.pre is {rule!r}; pdd knows {', '.join(_WORDS)}")
    return rule


def _strings(file: GgufFile, key: str) -> list[str]:
    values = file.value(key, list)
    if not all(isinstance(value, str) for value in values):
        raise ModelInvalid(f"{file.path}: metadata {key!r} must be a list of strings; fetch the file again")
    return values


def _numbers(file: GgufFile, key: str, default: list[float]) -> list[float]:
    values = file.value(key, list, default)
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        raise ModelInvalid(f"{file.path}: metadata {key!r} must be a list of numbers; fetch the file again")
    return values


def _pair(path: Path, merge: str, vocabulary: dict[str, int]) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not all(token in vocabulary for token in (left, right, left + right)):
        raise ModelInvalid(f"{path}: {merge[:60]!r} is no merge of two tokens into a third; fetch the file again")
    return left, right


def _added(tokens: list[str], types: list[int], kind: int) -> list[AddedToken]:
    """Tokens that are matched whole in the text before any cut."""
    picked = [token for token, each in zip(tokens, types, strict=True) if each == kind and token]
    return [AddedToken(token, normalized=False, special=kind == _CONTROL) for token in picked]


def _token_id(file: GgufFile, name: str, tokens: list[str]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    if key not in file.metadata:
        return None
    token_id = file.value(key, int)
    if not 0 <= token_id < len(tokens):
        raise ModelInvalid(f"{file.path}: {key} is {token_id}, but the vocabulary has {len(tokens)} tokens")
    return token_id
