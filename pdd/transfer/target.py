"""The decode half of one handoff: from the armed count to the last piece, or to the certainty that none will come."""

from __future__ import annotations

import msgspec

from pdd.base.ids import Immediate, Incarnation, RequestId


class Target(msgspec.Struct, kw_only=True):
    request: RequestId
    immediate: Immediate
    peer: Incarnation
    """Who holds the ticket."""
    num_pieces: int
    """Goal of the count while all goes well."""
    num_bytes: int
    arrived: bool = False
    """All is in place and the count is disarmed; only the slot is still held."""
    num_posted: int | None = None
    """What a prefiller that stopped says it had posted: then the goal of the drain."""
    shut_out: bool = False
    """The peer's key is closed, yet the provider may let late writes through: only time makes the pages safe."""

    @property
    def draining(self) -> bool:
        return self.num_posted is not None or self.shut_out
