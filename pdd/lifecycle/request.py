"""What is asked for and what comes back: the values that cross every floor in a request's life."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite

import msgspec

from pdd.base.errors import BadRequest
from pdd.base.ids import RequestId

MAX_TIMEOUT_S = 1e7
"""Beyond it a deadline is none."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How tokens are chosen. Checked and completed by the HTTP floor; engines take it as it is.

    Stop strings are not here: they are text, and text is the frontend's business (it ends the request itself).
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    """The random number of a token depends on (seed, position) alone: not on the batch, the replica or a retry."""
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end the sequence, end-of-sequence tokens included; not sampled before `min_tokens`."""
    num_logprobs: int | None = None
    """None: no logprobs. k >= 0: the sampled token's logprob and the k most likely ones."""


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One sequence to generate."""

    id: RequestId
    prompt: tuple[int, ...]
    """Token ids, at least one."""
    sampling: SamplingParams
    timeout_s: float | None = None
    """Time from submission to the last token, queueing included; None: the topology's default."""

    def check(self) -> None:
        """Raises BadRequest for what no replica could serve: HTTP lets none of it in, but peers may send anything."""
        sampling = self.sampling
        floats = [getattr(sampling, name) for name in ("temperature", "top_p", "min_p", "frequency_penalty",
                  "presence_penalty", "repetition_penalty")]  # fmt: skip
        broken = {
            "max_tokens": sampling.max_tokens < 1,
            "temperature": sampling.temperature < 0,
            "repetition_penalty": sampling.repetition_penalty <= 0,
            "top_k": sampling.top_k < 0,
            "num_logprobs": sampling.num_logprobs is not None and sampling.num_logprobs < 0,
            "sampling": not all(map(isfinite, (*floats, *sampling.logit_bias.values()))),
            "timeout_s": self.timeout_s is not None and not 0 < self.timeout_s <= MAX_TIMEOUT_S,
        }
        for field, is_broken in broken.items():
            if is_broken:
                raise BadRequest(f"request {self.id[:100]}: {field} is out of its range", param=field)


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities of one sampled position, before temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """(token id, logprob), most likely first; `num_logprobs` of them."""


class ErrorInfo(msgspec.Struct, frozen=True):
    """A PddError as data: what a frontend needs to answer the client."""

    code: str
    message: str
    http_status: int
    retryable: bool
    retry_after_s: float | None = None
    """For 429: when to come back."""


class TokenOutput(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of a request as they come; the last one has `finish_reason` or `error`."""

    request: RequestId
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    """As many as tokens where logprobs were asked for, else empty."""
    num_cached_tokens: int = 0
    """Prompt tokens that were found in the decode replica's prefix cache."""
    finish_reason: FinishReason | None = None
    stop_token: int | None = None
    """The stop token that ended the request; it is also the last of `tokens`."""
    error: ErrorInfo | None = None
    anew: bool = False
    """From a frontend only: the request was moved to another replica, and what came before this never was. Comes only
    before the consumer has said that it has shown something."""

    @property
    def last(self) -> bool:
        return self.finish_reason is not None or self.error is not None


class Readiness(msgspec.Struct, frozen=True):
    """Whether a daemon can serve now, and why (not)."""

    ready: bool
    reason: str
    """One sentence for an operator; also when ready (for example that no prefiller is reachable)."""
