"""One handoff at its target, over all ranks: it ends when each rank's part has."""

from __future__ import annotations

import msgspec

from pdd.base.ids import Immediate, Incarnation, RequestId
from pdd.transfer.events import Arrived, Drained


class Inbound(msgspec.Struct, kw_only=True):
    request: RequestId
    peer: Incarnation
    """Who holds the ticket."""
    immediates: tuple[Immediate, ...]
    """Of each rank; the first names the handoff."""
    ends: dict[int, Arrived | Drained] = {}
    """Of the ranks whose part is over."""

    @property
    def over(self) -> bool:
        return len(self.ends) == len(self.immediates)

    @property
    def open_ranks(self) -> list[int]:
        return [rank for rank in range(len(self.immediates)) if rank not in self.ends]

    @property
    def arrived_ranks(self) -> list[int]:
        return [rank for rank, end in self.ends.items() if isinstance(end, Arrived)]

    def end(self) -> Arrived | Drained:
        """How it ended, once it is over: arrived only if everywhere."""
        arrived = [it for it in self.ends.values() if isinstance(it, Arrived)]
        if len(arrived) < len(self.ends):
            fenced = any(isinstance(it, Drained) and it.fenced for it in self.ends.values())
            return Drained(request=self.request, immediate=self.immediates[0], fenced=fenced)
        arrived = [it for it in arrived if it.num_pieces]  # a rank that expected nothing has no times to tell
        return Arrived(
            request=self.request,
            immediate=self.immediates[0],
            num_pieces=sum(it.num_pieces for it in arrived),
            num_bytes=sum(it.num_bytes for it in arrived),
            first_s=min(it.first_s for it in arrived),
            last_s=max(it.last_s for it in arrived),
        )
