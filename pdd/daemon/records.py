"""What effects and stories need of a request beside its machine; one record for each side that it has on this node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from pdd.base.errors import PddError
from pdd.base.ids import Immediate, Incarnation, NodeName, ReplicaName, RequestId
from pdd.lifecycle.machine import Machine
from pdd.lifecycle.request import GenerateRequest, TokenOutput
from pdd.memory.pool import Allocation
from pdd.transfer.digest import DigestPlan
from pdd.transfer.events import Arrived, Sent
from pdd.wire.messages import PrefillRequest

Sink = Callable[[TokenOutput], None]
"""Where a request's outputs go; called until one is `last`."""


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
        self.allocation = Allocation([], 0)
        """Of the prompt, once it was admitted."""
        self.num_output_tokens = 0
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    @property
    def id(self) -> RequestId:
        return self.machine.request

    @property
    def num_pages(self) -> int:
        return len(self.allocation.pages)

    @property
    def num_cached_tokens(self) -> int:
        """Of the prompt, found in this replica's prefix cache."""
        return self.allocation.num_cached_tokens


class Handoff(msgspec.Struct):
    """One attempt to have a prompt prefilled elsewhere."""

    node: NodeName
    incarnation: Incarnation
    prefiller: ReplicaName
    immediate: Immediate
    stopping: bool = False
    """The prefiller knows that it is over (it said so, or it is gone): no cancel needs to be sent."""
    accepted: bool = False
    ended: bool = False
    """What the prefiller has said: it needs to say it once."""
    stopped: bool = False
    """The prefiller has confirmed the end, and how many pieces it had posted."""
    shut_out: bool = False
    """The prefiller's key is closed, yet its late writes may come: only time ends the drain."""
    plan: DigestPlan | None = None
    """Where the pages are to be verified."""
    arrived: Arrived | None = None
    """Kept while they are."""
    our_digests: tuple[int, ...] | None = None
    their_digests: tuple[int, ...] | None = None


class DecodeRequest(Record):
    def __init__(self, machine: Machine, replica: ReplicaName, request: GenerateRequest, sink: Sink) -> None:
        super().__init__(machine, "decode", replica, request.prompt)
        self.request = request
        self.sink = sink
        self.num_computed = 0
        """Prompt tokens whose KV is in our pages: cached ones, then all but the last once the handoff arrived."""
        self.handoff: Handoff | None = None
        self.attempts = 0
        self.failure = ""
        """Why the latest handoff failed."""
        self.retry_after_s: float | None = None
        """Where it failed only because the prefiller was full: when that may have room."""
        self.deadline: asyncio.TimerHandle | None = None
        self.lease: asyncio.TimerHandle | None = None


class PrefillJob(Record):
    def __init__(
        self, machine: Machine, replica: ReplicaName, ticket: PrefillRequest, node: NodeName, incarnation: Incarnation
    ) -> None:
        super().__init__(machine, "prefill", replica, ticket.prompt)
        self.ticket = ticket
        self.node = node
        self.incarnation = incarnation
        self.peer = ticket.target_replica
        self.sent: Sent | None = None
        """Kept when the last write ends before the executor has reported the step that made it, or before its pages
        are hashed."""
        self.rejection: PddError | None = None
        self.hashing = False
        """Its pages are being read for the target, which wants to verify them."""
        self.num_posted = (0,) * len(ticket.immediates)
        """Pieces that were posted to each target port, once the writes have ended."""
        self.writes_failed = False
        """Some of them may never arrive."""
        self.compute_s = 0.0
        """Of the steps that it took part in, perhaps with others."""
        self.lease: asyncio.TimerHandle | None = None
