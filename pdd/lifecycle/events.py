"""What can happen to a request, and what a machine asks to be done about it.

Events are facts; effects are orders. Whoever performs an effect (pdd/daemon) answers it with exactly one event,
failures included; effects that only free or tell something need no answer.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from pdd.base.errors import PddError, QueueFull
from pdd.lifecycle.request import ErrorInfo


class Event(msgspec.Struct, frozen=True):
    """`reason` goes into the story; it says what was seen, for a reader who was not there."""

    reason: str = ""


class PagesAllocated(Event, frozen=True):
    """The pool gave pages for the whole prompt."""


class LocalChosen(Event, frozen=True):
    """The prompt is prefilled where it is decoded."""


class TicketSent(Event, frozen=True):
    """A prefiller was asked; from now on it may write into our pages."""


class PrefillerAccepted(Event, frozen=True):
    """The prefiller took the ticket into its queue."""


class Scheduled(Event, frozen=True):
    """The sequence is in a step for the first time (again after a preemption)."""


class PrefillDone(Event, frozen=True):
    """The last chunk has been computed; its pages may still be on their way."""


class Arrived(Event, frozen=True):
    """The count is complete: every piece of every layer is in place."""


class Sent(Event, frozen=True):
    """All writes of the handoff completed at the source."""


class HandoffFailed(Event, frozen=True):
    """The prefiller rejected, stopped, went silent or took too long."""


class Drained(Event, frozen=True):
    """Nobody can write into our pages any more: all that was posted has been counted, or the peer is fenced."""


class Stopped(Event, frozen=True):
    """The source has posted its last write of this handoff, and all that were posted have ended."""


class Rejected(Event, frozen=True):
    """The ticket cannot be served; nothing was posted."""


class Preempted(Event, frozen=True):
    """The sequence lost its pages to an older one and will be computed again."""


class Finished(Event, frozen=True):
    """The last token was sampled, or a stop string ended the text."""


class CancelAsked(Event, frozen=True):
    """Nobody wants the answer any more."""


class Broken(Event, frozen=True):
    """The request cannot go on; `error` goes to the client."""

    error: ErrorInfo | None = None


class Effect(StrEnum):
    """Orders of the machines. Comments name the event that ends each."""

    ALLOCATE = "allocate"  # PagesAllocated | Broken
    ROUTE = "route"  # LocalChosen | TicketSent | Broken
    STOP_HANDOFF = "stop handoff"  # Drained
    ENQUEUE = "enqueue"  # Scheduled | Broken
    STOP_WRITES = "stop writes"  # Stopped
    CONFIRM_STOP = "confirm stop"
    REJECT = "reject"
    TELL = "tell"
    RELEASE = "release"


def broken(error: PddError) -> Broken:
    return Broken(str(error), error_info(error))


def error_info(error: PddError) -> ErrorInfo:
    """A PddError as the data that a frontend answers with."""
    retry_after_s = error.retry_after_s if isinstance(error, QueueFull) else None
    return ErrorInfo(error.code, str(error), error.http_status, error.retryable, retry_after_s)
