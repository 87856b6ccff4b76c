"""What effects and stories need of a request beside its machine; one record for each side that it has on this node."""

from __future__ import annotations

import msgspec

from pdd.base.ids import ReplicaName, RequestId
from pdd.lifecycle.machine import Machine


class Transfer(msgspec.Struct):
    """What moved for a request, for its story. Times are of the daemon's clock."""

    num_pieces: int = 0
    num_bytes: int = 0
    first_s: float | None = None
    last_s: float | None = None
    landed_share: float | None = None
    """Share of the pieces that were in place when the news of the prefill's end came."""
    prefill_done_s: float | None = None
    """When that news came."""


class Record:
    def __init__(self, machine: Machine, side: str, replica: ReplicaName, prompt: tuple[int, ...]) -> None:
        self.machine = machine
        self.side = side
        """decode | prefill"""
        self.replica = replica
        self.prompt = prompt
        self.peer: ReplicaName | None = None
        """The replica at the other end of the (latest) handoff."""
        self.transfer = Transfer()
        self.num_pages = 0
        self.num_cached_tokens = 0
        self.num_output_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def id(self) -> RequestId:
        return self.machine.request
