"""What clients read: the bodies of the OpenAI API, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from pdd.http.choice import Piece, Position
from pdd.http.vocabulary import Vocabulary
from pdd.lifecycle.request import FinishReason


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Completion(msgspec.Struct, frozen=True, kw_only=True):
    """The frame of both endpoints' answers, whole or chunk."""

    id: str
    object: str
    created: int
    """Seconds since 1970."""
    model: str
    choices: Sequence[msgspec.Struct]
    usage: Usage | UnsetType | None = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class TextLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class TextChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason | None = None


class Format(Protocol):
    """One endpoint's way to write choices."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def opening(self, index: int) -> list[msgspec.Struct]:
        """The chunks that come before everything else of a choice."""
        ...

    def delta(self, index: int, piece: Piece) -> msgspec.Struct: ...

    def ending(self, index: int, reason: FinishReason) -> msgspec.Struct: ...

    def whole(self, index: int, piece: Piece, reason: FinishReason) -> msgspec.Struct: ...


class ChatFormat:
    id_prefix = "chatcmpl"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, vocabulary: Vocabulary, *, logprobs: bool) -> None:
        self._vocabulary = vocabulary
        self._logprobs = logprobs

    def opening(self, index: int) -> list[msgspec.Struct]:
        return [ChatChunkChoice(index=index, delta=ChatDelta(role="assistant", content=""))]

    def delta(self, index: int, piece: Piece) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(content=piece.text), logprobs=self._of(piece.positions))

    def ending(self, index: int, reason: FinishReason) -> ChatChunkChoice:
        return ChatChunkChoice(index=index, delta=ChatDelta(), finish_reason=reason)

    def whole(self, index: int, piece: Piece, reason: FinishReason) -> ChatChoice:
        message = ChatMessage(content=piece.text)
        return ChatChoice(index=index, message=message, logprobs=self._of(piece.positions), finish_reason=reason)

    def _of(self, positions: list[Position]) -> ChatLogprobs | None:
        if not self._logprobs:
            return None
        content = []
        for position in positions:
            scores = position.logprobs
            top = [TopLogprob(*self._entry(token, logprob)) for token, logprob in scores.top]
            content.append(TokenLogprob(*self._entry(scores.token, scores.logprob), top))
        return ChatLogprobs(content)

    def _entry(self, token: int, logprob: float) -> tuple[str, float, list[int]]:
        piece = self._vocabulary.piece(token)
        return piece.decode(errors="replace"), json_logprob(logprob), list(piece)


class TextFormat:
    id_prefix = "cmpl"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, vocabulary: Vocabulary, *, logprobs: bool, echoes: Sequence[str]) -> None:
        """`echoes`: what goes before each choice's own text; empty texts where nothing does."""
        self._vocabulary = vocabulary
        self._logprobs = logprobs
        self._echoes = echoes

    def opening(self, index: int) -> list[msgspec.Struct]:
        return [TextChoice(index=index, text=self._echoes[index])] if self._echoes[index] else []

    def delta(self, index: int, piece: Piece) -> TextChoice:
        return TextChoice(index=index, text=piece.text, logprobs=self._of(piece.positions))

    def ending(self, index: int, reason: FinishReason) -> TextChoice:
        return TextChoice(index=index, text="", finish_reason=reason)

    def whole(self, index: int, piece: Piece, reason: FinishReason) -> TextChoice:
        text = self._echoes[index] + piece.text
        return TextChoice(index=index, text=text, logprobs=self._of(piece.positions), finish_reason=reason)

    def _of(self, positions: list[Position]) -> TextLogprobs | None:
        if not self._logprobs:
            return None
        return TextLogprobs(
            tokens=[self._name(position.logprobs.token) for position in positions],
            token_logprobs=[json_logprob(position.logprobs.logprob) for position in positions],
            top_logprobs=[
                {self._name(token): json_logprob(logprob) for token, logprob in position.logprobs.top}
                for position in positions
            ],
            text_offset=[position.text_offset for position in positions],
        )

    def _name(self, token: int) -> str:
        """The token's text; where its bytes are no whole characters, `bytes:\\xe4\\xbd`, as OpenAI writes it."""
        piece = self._vocabulary.piece(token)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def json_logprob(logprob: float) -> float:
    """JSON has no minus infinity (a token that a mask forbids); OpenAI writes -9999.0."""
    return max(logprob, -9999.0)
