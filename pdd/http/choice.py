"""One choice of an answer as it grows: from a sequence's tokens to the text that may be shown."""

from __future__ import annotations

import msgspec

from pdd.http.detokenizer import Detokenizer, StopScanner
from pdd.http.vocabulary import Vocabulary
from pdd.lifecycle.request import FinishReason, TokenLogprobs, TokenOutput


class TextOptions(msgspec.Struct, frozen=True, kw_only=True):
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    """Whether the stop string or stop token that ends the answer is part of it."""
    skip_special_tokens: bool = True
    min_tokens: int = 0
    """Stop strings within the text of the first `min_tokens` tokens do not count."""


class Position(msgspec.Struct, frozen=True):
    """Logprobs of one token, and how many characters of the answer came before it."""

    logprobs: TokenLogprobs
    text_offset: int


class Piece(msgspec.Struct, frozen=True):
    """What one output adds to a choice."""

    text: str
    positions: list[Position]
    finish_reason: FinishReason | None


class Choice:
    def __init__(self, vocabulary: Vocabulary, options: TextOptions) -> None:
        self._options = options
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=options.skip_special_tokens)
        self._stops = StopScanner(options.stop, include_stop=options.include_stop)
        self._num_characters = 0
        self.num_tokens = 0
        self.num_cached_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended it, whatever the sequence does."""
        return self._stops.found is not None

    def push(self, output: TokenOutput) -> Piece:
        """Takes the tokens of an output up to the one that completes a stop string; later ones never were."""
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        text = ""
        positions: list[Position] = []
        for place, token in enumerate(output.tokens):
            self.num_tokens += 1
            if output.logprobs:
                positions.append(Position(output.logprobs[place], self._num_characters))
            is_stop_token = output.stop_token is not None and place == len(output.tokens) - 1
            if self._options.include_stop or not is_stop_token:
                text += self._show(self._detokenizer.push(token))
            if self.stopped:
                return Piece(text, positions, FinishReason.STOP)
        if output.finish_reason is None:
            return Piece(text, positions, None)
        text += self._show(self._detokenizer.flush())
        reason = FinishReason.STOP if self.stopped else output.finish_reason
        return Piece(text + self._stops.flush(), positions, reason)

    def _show(self, text: str) -> str:
        self._num_characters += len(text)
        return self._stops.push(text) if self.num_tokens > self._options.min_tokens else text
