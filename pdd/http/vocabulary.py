"""Tokens as bytes: the first thing that happens to a prompt and the last that happens to an answer.

A token is seen as the bytes that it adds to the text, so that text can be put together token by token without decoding
anything twice, and a character that is cut by a token border is simply an unfinished UTF-8 sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from tokenizers import Tokenizer

from pdd.base.errors import ModelInvalid

_SENTENCEPIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
_WORD_BORDER = "\u2581"
"""SentencePiece's mark for a space."""


class Vocabulary(Protocol):
    size: int
    """Token ids are 0 .. size - 1."""
    max_piece_bytes: int
    """No token stands for a longer text than this."""

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, special tokens that are written in it included; adds none of its own."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of a whole sequence, special tokens included."""
        ...

    def piece(self, token: int) -> bytes:
        """The bytes that `token` adds to a running text; empty for ids that no token has."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether the token is a mark of the model's own (end of turn, ...) rather than text."""
        ...


class ByteVocabulary:
    """Token t < 256 is byte t; the ids above are special and have no text."""

    max_piece_bytes = 1

    def __init__(self, size: int) -> None:
        self.size = size

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")

    def piece(self, token: int) -> bytes:
        return bytes([token]) if token < 256 else b""

    def is_special(self, token: int) -> bool:
        return token >= 256


class TokenizerVocabulary:
    """A `tokenizer.json` of the byte-level or the SentencePiece family.

    Raises ModelInvalid when its decoder is of another family, because then a token has no bytes of its own.
    """

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self.size = size
        self._tokenizer = tokenizer
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._special = frozenset(
            token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special
        )
        self.max_piece_bytes = max(len(name.encode()) for name in tokenizer.get_vocab())
        self._to_bytes = _piece_reader(tokenizer)
        self._pieces: dict[int, bytes] = {}

    @classmethod
    def open(cls, path: Path, size: int) -> TokenizerVocabulary:
        """Reads a `tokenizer.json`; raises ModelInvalid when that is not possible."""
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every fault of the file
            raise ModelInvalid(f"{path} is not a tokenizer that can be read: {error}") from error
        return cls(tokenizer, size)

    def encode(self, text: str) -> list[int]:
        # As a batch of one, because only batches let other threads run meanwhile.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def decode(self, tokens: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    def piece(self, token: int) -> bytes:
        piece = self._pieces.get(token)
        if piece is None:
            name = self._tokenizer.id_to_token(token)
            piece = self._pieces[token] = b"" if name is None else self._to_bytes(name)
        return piece

    def is_special(self, token: int) -> bool:
        return token in self._special


def _piece_reader(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    decoder = tokenizer.decoder
    description = {"type": "none"} if decoder is None else json.loads(decoder.__getstate__())
    kinds = {step["type"] for step in description.get("decoders", [description])}
    if "ByteLevel" in kinds:
        return _byte_level_piece
    if kinds <= _SENTENCEPIECE_DECODERS:
        return _sentencepiece_piece
    raise ModelInvalid(
        f"the tokenizer's decoder is {', '.join(sorted(kinds))}; pdd knows ByteLevel and the SentencePiece family"
        f" ({', '.join(sorted(_SENTENCEPIECE_DECODERS))})"
    )


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the other 68 for U+0100 onwards in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_piece(name: str) -> bytes:
    try:
        return bytes([_BYTE_OF_CHARACTER[character] for character in name])
    except KeyError:  # an added token, which is written as it is
        return name.encode()


def _sentencepiece_piece(name: str) -> bytes:
    if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", name):
        return bytes([int(byte[1], 16)])
    return name.replace(_WORD_BORDER, " ").encode()
