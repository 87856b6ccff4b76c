"""What messengers and their group tell their owner: the ends of handoffs, and what is wrong with the fabric."""

from __future__ import annotations

import msgspec

from pdd.base.ids import Immediate, RequestId


class Sent(msgspec.Struct, frozen=True, kw_only=True):
    """Source: every piece was announced and every write completed. The source pages may be reused."""

    request: RequestId
    immediate: Immediate
    """The first of the ticket's, which names the handoff; here and below."""
    num_pieces: tuple[int, ...]
    """For each target port (see plan.py)."""
    num_bytes: int
    """To all of them."""


class Stopped(msgspec.Struct, frozen=True, kw_only=True):
    """Source: nothing more will be posted, and what was has ended. The source pages may be reused."""

    request: RequestId
    immediate: Immediate
    num_pieces: tuple[int, ...]
    """For each target port the pieces that were posted, which it may still have to count."""
    reason: str
    failed: bool = False
    """A write failed: of what was posted some may never arrive, and nobody here knows what."""


class Arrived(msgspec.Struct, frozen=True, kw_only=True):
    """Target: every expected piece is in place. `forget` the handoff when it is not needed any more."""

    request: RequestId
    immediate: Immediate
    num_pieces: int
    num_bytes: int
    first_s: float
    """time.monotonic() of the first and of the last piece's arrival."""
    last_s: float


class Drained(msgspec.Struct, frozen=True, kw_only=True):
    """Target: the handoff is over without all of its pieces, and nothing can be written for it any more."""

    request: RequestId
    immediate: Immediate
    fenced: bool
    """True: because the writer was shut out. False: because all that was posted has been counted."""


class Stray(msgspec.Struct, frozen=True):
    """Pieces arrived that no handoff expects."""

    num_pieces: int


class PortBroken(msgspec.Struct, frozen=True):
    """A fabric endpoint is gone for good. Nothing new is taken, and every handoff under way ends as soon as that is
    safe: its peers' keys are closed, its other ports send no more."""

    error: int
    """A positive errno."""


TransferEvent = Sent | Stopped | Arrived | Drained | Stray | PortBroken
