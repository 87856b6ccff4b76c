"""A prefill ticket as the prefiller reads it, before it takes anything of it on."""

from __future__ import annotations

import math
from collections.abc import Iterator

import msgspec

from pdd.base.errors import BadTicket
from pdd.base.ids import Immediate, Incarnation, ReplicaName
from pdd.fabric.immediate import generation_of, pack, slot_of
from pdd.memory.shape import KvShape
from pdd.transfer.plan import incompatibilities, lacking_pages
from pdd.transfer.source import Destination, TargetRank
from pdd.wire.messages import Grant, PrefillRequest


class TargetReplica(msgspec.Struct, frozen=True, kw_only=True):
    """A replica set of one incarnation of its node: what its ranks have given us, and what we have used of it."""

    peer: Incarnation
    name: ReplicaName
    grants: dict[int, Grant] = {}
    """By rank."""
    generations: dict[tuple[int, int], int] = {}
    """Of each rank and slot the generation that we have served last: a ticket is good for one handoff."""

    def renew(self, grant: Grant) -> None:
        """A rank's new grant: its slots may begin anew."""
        self.grants[grant.rank] = grant
        for key in [it for it in self.generations if it[0] == grant.rank]:
            del self.generations[key]

    def destination(self, ticket: PrefillRequest, rank: int, shape: KvShape) -> Destination:
        """One rank of the ticket's target, which has that shape."""
        to = TargetRank(self.peer, self.name, rank)
        return Destination(to=to, layout=shape.layout, immediate=ticket.immediates[rank])

    def consume(self, ticket: PrefillRequest) -> None:
        for rank, immediate in enumerate(ticket.immediates):
            self.generations[rank, slot_of(immediate)] = generation_of(immediate)

    def is_consumed(self, rank: int, immediate: Immediate) -> bool:
        return self.generations.get((rank, slot_of(immediate))) == generation_of(immediate)


def check_ticket(ticket: PrefillRequest, replica: TargetReplica, own: KvShape, target: KvShape) -> None:
    """Raises BadTicket, naming every field that is wrong. What passes can only be written where its pages say."""
    faults = list(incompatibilities(own, target))
    if not faults:
        faults += _page_faults(ticket, own, target)
        faults += _rank_faults(ticket, replica, target)
    if ticket.target_incarnation != replica.peer:
        faults.append(f"target_incarnation: {ticket.target_incarnation[:40]} came over the link of {replica.peer}")
    if ticket.shape_digest != target.digest():
        faults.append(f"shape_digest: {ticket.shape_digest[:40]}, announced was {target.digest()}")
    if not (ticket.lease_s > 0 and math.isfinite(ticket.lease_s)):
        faults.append(f"lease_s: {ticket.lease_s}")
    if faults:
        raise BadTicket(f"ticket {ticket.request[:100]} of {replica.name}: " + "; ".join(faults))


def _page_faults(ticket: PrefillRequest, own: KvShape, target: KvShape) -> Iterator[str]:
    num_tokens = len(ticket.prompt) - 1
    pages, layout = ticket.target_pages, target.layout
    if ticket.start_token % layout.page_tokens or not 0 <= ticket.start_token < num_tokens:
        yield f"start_token: {ticket.start_token} is no multiple of {layout.page_tokens} below {num_tokens}"
    elif len(pages) != (num_lacking := len(lacking_pages(layout, ticket.start_token, num_tokens))):
        yield f"target_pages: {len(pages)} for {num_lacking} pages of KV"
    if len(set(pages)) != len(pages):
        yield "target_pages: a page stands there twice"
    if not all(0 <= page < layout.num_pages for page in pages):
        yield f"target_pages: some are outside of the target's {layout.num_pages}"


def _rank_faults(ticket: PrefillRequest, replica: TargetReplica, target: KvShape) -> Iterator[str]:
    if len(ticket.immediates) != target.tp:
        yield f"immediates: {len(ticket.immediates)} for {target.tp} ranks"
        return
    for rank, immediate in enumerate(ticket.immediates):
        if rank not in replica.grants:
            yield f"target_replica: rank {rank} has granted us no memory key"
        if not 0 <= immediate < 1 << 32 or immediate != pack(slot_of(immediate), generation_of(immediate)):
            yield f"immediates: {immediate} of rank {rank} is none"
        elif replica.is_consumed(rank, immediate):
            yield f"immediates: {immediate} of rank {rank} was used by an earlier ticket"
