"""What a scheduler hands out and gets back: one step's plan, and what came of it."""

from __future__ import annotations

import msgspec

from pdd.base.ids import PageId, RequestId
from pdd.engine.protocol import Step
from pdd.lifecycle.request import FinishReason, TokenLogprobs


class PrefillChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Positions `start ... end - 1` of a sequence of a prefill replica: what the KV messenger can send of this step.

    The first chunk begins at 0, whatever the prefix cache held. Chunks of a sequence follow each other without a gap,
    and all but the last end on a page boundary, so that no page is in two of them.
    """

    request: RequestId
    start: int
    end: int
    is_last: bool
    armed: bool
    """True: part of it is computed by this step, so its writes wait for the layer counter. False: all of it is in
    place (the prefix cache held it), and this step will not move the counter for it."""
    pages: tuple[PageId, ...]
    """The pages that hold these positions."""


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    step: Step
    """For every executor of the replica."""
    requests: tuple[RequestId, ...]
    """The request of each row of the step."""
    started: tuple[RequestId, ...]
    """Requests that are in a step for the first time, or again after a preemption."""
    counter_base: int
    """What the executors' layer counters show before this step: layer l of it is in place at counter_base + l + 1."""
    chunks: tuple[PrefillChunk, ...]
    """Prefill replicas only. To be announced to the messenger before the step goes out."""


class TokenSampled(msgspec.Struct, frozen=True, kw_only=True):
    """With `finish` the sequence has left the scheduler; its pages are the caller's to release."""

    request: RequestId
    token: int
    logprobs: TokenLogprobs | None
    finish: FinishReason | None
    stop_token: int | None
    """`token`, where it is a stop token that ended the sequence."""


class PrefillComputed(msgspec.Struct, frozen=True):
    """The goal is reached and the sequence has left the scheduler; its pages stay until all writes have ended."""

    request: RequestId


class Preempted(msgspec.Struct, frozen=True):
    """Its pages went to older sequences before this step; it starts again by itself when there is room."""

    request: RequestId


class Failed(msgspec.Struct, frozen=True):
    """It can never go on and has left the scheduler; its pages are the caller's to release."""

    request: RequestId
    reason: str


class Removed(msgspec.Struct, frozen=True):
    """It was removed while this step ran; now its pages may be released."""

    request: RequestId


Outcome = TokenSampled | PrefillComputed | Preempted | Failed | Removed
