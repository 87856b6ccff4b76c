"""The answer to one HTTP request as it grows: outputs of its sequences in, bodies of the API out."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from pdd.base.errors import InvariantBroken
from pdd.http.choice import Choice, Piece, Position
from pdd.http.plan import Plan, ServedModel
from pdd.http.responses import Completion, PromptTokensDetails, Usage
from pdd.lifecycle.request import FinishReason, TokenOutput


class Answer:
    def __init__(self, plan: Plan, model: ServedModel, created_s: int) -> None:
        self._plan = plan
        self._model_name = model.name
        self._created_s = created_s
        self._choices = [self._new_choice(model) for _ in range(plan.num_sequences)]

    def _new_choice(self, model: ServedModel) -> Choice:
        return Choice(model.text.vocabulary, self._plan.text)

    def push(self, index: int, output: TokenOutput) -> Piece:
        return self._choices[index].push(output)

    def stopped(self, index: int) -> bool:
        """Whether a stop string has ended the choice."""
        return self._choices[index].stopped

    @property
    def usage(self) -> Usage:
        """Tokens so far; a token that ended the answer counts, one after a stop string does not."""
        num_prompt_tokens = self._plan.num_prompt_tokens
        num_tokens = sum(choice.num_tokens for choice in self._choices)
        first = 0
        num_cached_tokens = 0
        for choices in self._plan.prompts:
            num_cached_tokens += self._choices[first].num_cached_tokens
            first += len(choices)
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=num_tokens,
            total_tokens=num_prompt_tokens + num_tokens,
            prompt_tokens_details=PromptTokensDetails(num_cached_tokens),
        )

    def frame(self, object_: str, choices: Sequence[msgspec.Struct], usage: Usage | UnsetType | None) -> Completion:
        return Completion(
            id=self._plan.id,
            object=object_,
            created=self._created_s,
            model=self._model_name,
            choices=choices,
            usage=usage,
        )


class WholeAnswer(Answer):
    """Collects everything, for a client that does not stream."""

    def __init__(self, plan: Plan, model: ServedModel, created_s: int) -> None:
        super().__init__(plan, model, created_s)
        self._model = model
        self._texts: list[list[str]] = [[] for _ in self._choices]
        self._positions: list[list[Position]] = [[] for _ in self._choices]
        self._reasons: list[FinishReason | None] = [None for _ in self._choices]

    def add(self, index: int, output: TokenOutput) -> None:
        if output.anew:
            self._choices[index] = self._new_choice(self._model)
            self._texts[index], self._positions[index], self._reasons[index] = [], [], None
        piece = self.push(index, output)
        self._texts[index].append(piece.text)
        self._positions[index].extend(piece.positions)
        self._reasons[index] = piece.finish_reason

    def completion(self) -> Completion:
        """Raises InvariantBroken when a choice is not finished."""
        choices = []
        for index, reason in enumerate(self._reasons):
            if reason is None:
                raise InvariantBroken(f"choice {index} of {self._plan.id} has no finish reason")
            piece = Piece("".join(self._texts[index]), self._positions[index], reason)
            choices.append(self._plan.format.whole(index, piece, reason))
        return self.frame(self._plan.format.whole_object, choices, self.usage)


class StreamedAnswer(Answer):
    """Turns each output into chunks."""

    def __init__(self, plan: Plan, model: ServedModel, created_s: int) -> None:
        super().__init__(plan, model, created_s)
        self._opened: set[int] = set()

    def chunks(self, index: int, output: TokenOutput) -> list[Completion]:
        """In order: once the choice's opening, a delta where there is something new, at last the ending."""
        format_ = self._plan.format
        piece = self.push(index, output)
        choices: list[msgspec.Struct] = []
        if index not in self._opened:
            self._opened.add(index)
            choices += format_.opening(index)
        if piece.text or piece.positions:
            choices.append(format_.delta(index, piece))
        if piece.finish_reason is not None:
            choices.append(format_.ending(index, piece.finish_reason))
        return [self._chunk(choice) for choice in choices]

    def closing(self) -> list[Completion]:
        """The usage chunk, where the client wants one."""
        wanted = self._plan.usage.include_usage
        return [self.frame(self._plan.format.chunk_object, [], self.usage)] if wanted else []

    def _chunk(self, choice: msgspec.Struct) -> Completion:
        usage: Usage | UnsetType | None = UNSET
        if self._plan.usage.continuous_usage_stats:
            usage = self.usage
        elif self._plan.usage.include_usage:
            usage = None
        return self.frame(self._plan.format.chunk_object, [choice], usage)
