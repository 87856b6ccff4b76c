"""One handoff at its target, over all ports: it ends when each port's part has."""

from __future__ import annotations

import msgspec

from pdd.base.ids import Immediate, Incarnation, RequestId
from pdd.transfer.events import Arrived, Drained


class Inbound(msgspec.Struct, kw_only=True):
    request: RequestId
    peer: Incarnation
    """Who holds the ticket."""
    immediates: tuple[Immediate, ...]
    """Of each port; the first names the handoff."""
    ends: dict[int, Arrived | Drained] = {}
    """Of the ports whose part is over."""

    @property
    def over(self) -> bool:
        return len(self.ends) == len(self.immediates)

    @property
    def open_ports(self) -> list[int]:
        return [port for port in range(len(self.immediates)) if port not in self.ends]

    @property
    def arrived_ports(self) -> list[int]:
        return [port for port, end in self.ends.items() if isinstance(end, Arrived)]

    def end(self) -> Arrived | Drained:
        """How it ended, once it is over: arrived only if everywhere."""
        arrived = [it for it in self.ends.values() if isinstance(it, Arrived)]
        if len(arrived) < len(self.ends):
            fenced = any(isinstance(it, Drained) and it.fenced for it in self.ends.values())
            return Drained(request=self.request, immediate=self.immediates[0], fenced=fenced)
        arrived = [it for it in arrived if it.num_pieces]  # a port that expected nothing has no times to tell
        return Arrived(
            request=self.request,
            immediate=self.immediates[0],
            num_pieces=sum(it.num_pieces for it in arrived),
            num_bytes=sum(it.num_bytes for it in arrived),
            first_s=min(it.first_s for it in arrived),
            last_s=max(it.last_s for it in arrived),
        )
