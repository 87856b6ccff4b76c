"""A node that has the key of the cluster and says whatever fits the types: false, doubled, out of turn, of others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import msgspec
from simulated_links import SimulatedLinks

from pdd.base.ids import Immediate, Incarnation, NodeName, PageId, ReplicaName, RequestId
from pdd.lifecycle.request import FinishReason, GenerateRequest, SamplingParams, TokenOutput
from pdd.topology.model import Role
from pdd.wire import messages as wire

if TYPE_CHECKING:
    from simulated_cluster import Cluster

STRANGER = NodeName("mallory")
PREFILLER, DECODER = ReplicaName(f"{STRANGER}/0"), ReplicaName(f"{STRANGER}/1")
"""What it pretends to have. The decoder never says that it is ready."""
MAX_REQUESTS = 3
"""That it submits: more would fill everybody's line, as any client may."""
T = TypeVar("T")


class Stranger:
    """It knows every id that is in use, though not the keys that others were granted. It decodes nothing for anybody,
    so that every answer that a client gets must be right."""

    def __init__(self, cluster: Cluster, random_: random.Random) -> None:
        self.links = SimulatedLinks(
            STRANGER, Incarnation("mallory.1"), cluster.topology.nodes.keys() - {STRANGER}, hostile=True
        )
        self.links.user = self
        self._cluster = cluster
        self._random = random_
        self._infos: dict[ReplicaName, wire.ReplicaInfo] = {}
        self._tickets: list[wire.PrefillRequest] = []
        """That it was sent."""
        self._said: list[wire.Message] = []
        self._num_submitted = 0

    # wire.links.LinkUser.

    def link_up(self, peer: NodeName, incarnation: Incarnation) -> None:
        self.links.send(peer, wire.Load(sequence=0, replicas=(self._loaded(DECODER),)))

    def link_down(self, peer: NodeName, incarnation: Incarnation, reason: str) -> None: ...

    def load(self) -> wire.Load:
        return wire.Load(sequence=0, replicas=())

    def message(self, peer: NodeName, incarnation: Incarnation, message: wire.Message) -> None:
        if isinstance(message, wire.Announce):
            self._infos |= {info.name: info for info in message.replicas}
        if isinstance(message, wire.PrefillRequest):
            self._tickets.append(message)

    def speak(self) -> None:
        if not self.links.up:
            return
        peer = self._one_of(sorted(self.links.up))
        if self._infos and self._random.random() < 0.15:
            self._pretend_to(peer)
            return
        kinds: list[Callable[[], wire.Message]] = [
            self._announce, self._announce, self._load, self._submit, self._output, self._cancel, self._grant,
            self._ticket, self._ticket, self._news, self._news, self._news, self._cancel_prefill, self._handshake,
        ]  # fmt: skip
        again = self._said and self._random.random() < 0.2
        message = self._one_of(self._said) if again else self._one_of(kinds)()
        self._said = [*self._said[-20:], message]
        if isinstance(message, wire.PrefillRequest) and self._random.random() < 0.9:
            asked = NodeName(message.source_replica.partition("/")[0])
            peer = asked if asked in self.links.up else peer
        for _ in range(self._one_of([1, 1, 1, 3])):
            self.links.send(peer, message)

    def _pretend_to(self, peer: NodeName) -> None:
        """It is a decoder like any other, and grants memory that nobody can reach."""
        info = self._pretended()
        self.links.send(peer, wire.Announce(replicas=(info,)))
        for rank in range(info.shape.tp):
            grant = wire.Grant(replica=DECODER, rank=rank, nic=0, address=b"loopback:9999:1", key=rank + 1, base=0)
            self.links.send(peer, grant)

    # Values.

    def _one_of(self, choices: list[T]) -> T:
        return self._random.choice(choices)

    def _number(self) -> int:
        return self._one_of([0, 0, 1, 1, 2, 3, 7, 40, -1, -(2**63), 2**31, 2**40, 2**63 - 1])

    def _float(self) -> float:
        return self._one_of([0.0, 0.5, 1.0, 30.0, -1.0, 1e-9, 1e300, float("nan"), float("inf")])

    def _request(self) -> RequestId:
        clients = [client.request.id for client in self._cluster.clients]
        tickets = [ticket.request for ticket in self._tickets]
        return self._one_of([*clients, *tickets, *tickets, RequestId("m1"), RequestId("m2"), RequestId("")])

    def _replica(self) -> ReplicaName:
        return self._one_of([PREFILLER, DECODER, *sorted(self._infos), ReplicaName("?")])

    def _prompt(self) -> tuple[int, ...]:
        size = self._one_of([0, 1, 2, 9, 9, 20, 20, 600])
        tokens = [self._random.randrange(50_000) for _ in range(size)]
        if tokens and self._random.random() < 0.2:
            tokens[0] = self._number()
        return tuple(tokens)

    def _immediates(self) -> tuple[Immediate, ...]:
        known = [ticket.immediates for ticket in (*self._cluster.tickets[-9:], *self._tickets[-9:])]
        made = tuple(Immediate(self._random.randrange(64) << 20) for _ in range(self._one_of([1, 1, 2])))
        return self._one_of([made, made, *known, (Immediate(self._number()),)])

    # Messages.

    def _announce(self) -> wire.Announce:
        return wire.Announce(
            replicas=tuple(self._info() for _ in range(self._one_of([0, 1, 1, 2]) if self._infos else 0))
        )

    def _info(self) -> wire.ReplicaInfo:
        if self._random.random() < 0.5:
            return self._pretended()
        info = self._one_of([self._infos[name] for name in sorted(self._infos)])
        name = self._replica()
        roles = {PREFILLER: Role.PREFILL.value, DECODER: Role.DECODE.value}
        role = roles.get(name) or self._one_of([Role.PREFILL.value, Role.DECODE.value, "?"])
        info = msgspec.structs.replace(info, name=name, role=role)
        if self._random.random() < 0.3:
            info = msgspec.structs.replace(info, max_sequences=self._number())
        if self._random.random() < 0.3:
            field = self._one_of(["page_tokens", "num_pages", "num_kv_heads", "num_planes", "num_layers"])
            layout = msgspec.structs.replace(info.shape.layout, **{field: self._number()})
            info = msgspec.structs.replace(info, shape=msgspec.structs.replace(info.shape, layout=layout))
        if self._random.random() < 0.1:
            layout = msgspec.structs.replace(info.shape.layout, num_kv_heads=1)
            shape = msgspec.structs.replace(info.shape, tp=self._number(), layout=layout)
            info = msgspec.structs.replace(info, shape=shape)
        if self._random.random() < 0.1:
            info = msgspec.structs.replace(info, ranks=())
        return info

    def _pretended(self) -> wire.ReplicaInfo:
        """A decoder like those that there are."""
        decoders = [self._infos[name] for name in sorted(self._infos) if self._infos[name].role == Role.DECODE]
        return msgspec.structs.replace(
            self._one_of(decoders or list(self._infos.values())), name=DECODER, role="decode"
        )

    def _load(self) -> wire.Load:
        """Its own decode replicas are never ready: what is asked of them would be answered by nobody."""
        names = [DECODER, self._replica()]
        return wire.Load(sequence=self._number(), replicas=tuple(map(self._loaded, names)))

    def _loaded(self, name: ReplicaName) -> wire.ReplicaLoad:
        return wire.ReplicaLoad(
            name=name, ready=name != DECODER and self._random.random() < 0.8, free_pages=self._number(),
            num_queued=self._number(), num_running=self._number(), queued_tokens=self._number(),
        )  # fmt: skip

    def _submit(self) -> wire.Message:
        if self._num_submitted == MAX_REQUESTS:
            return self._cancel()
        self._num_submitted += 1
        sampling = SamplingParams(max_tokens=self._one_of([1, 4, self._number()]), min_tokens=self._number())
        for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty"):
            if self._random.random() < 0.2:
                sampling = msgspec.structs.replace(sampling, **{name: self._float()})
        # An id that is still to come is as good as a key: 96 random bits.
        running = [client.request.id for client in self._cluster.clients if client.tokens]
        request = GenerateRequest(
            id=self._one_of([*running, RequestId("m1"), RequestId("m2"), RequestId("")]), prompt=self._prompt(),
            sampling=sampling,
            timeout_s=self._one_of([None, 1e6, self._float()]),
        )  # fmt: skip
        return wire.Submit(replica=self._replica(), request=request)

    def _output(self) -> wire.Output:
        finish = self._one_of([None, FinishReason.STOP])
        return wire.Output(output=TokenOutput(request=self._request(), tokens=(self._number(),), finish_reason=finish))

    def _cancel(self) -> wire.Cancel:
        return wire.Cancel(request=self._request(), stopped=self._random.random() < 0.5)

    def _grant(self) -> wire.Grant:
        address = self._one_of([b"loopback:9999:1", b"loopback:9999:2", b"", b"?"])
        return wire.Grant(
            replica=self._one_of([DECODER, DECODER, self._replica()]), rank=self._one_of([0, 0, 1, self._number()]),
            nic=self._one_of([0, 0, 0, 1, self._number()]), address=address, key=self._random.getrandbits(62), base=0,
        )  # fmt: skip

    def _ticket(self) -> wire.Message:
        if self._tickets and self._random.random() < 0.2:
            return self._one_of(self._tickets)  # as if it were its own
        if not self._infos:
            return self._load()
        ticket = self._good_ticket()
        for _ in range(self._one_of([0, 0, 1, 1, 2])):
            ticket = msgspec.structs.replace(ticket, **self._one_of(self._faults(ticket)))
        return ticket

    def _good_ticket(self) -> wire.PrefillRequest:
        info, prompt = self._pretended(), tuple(self._random.randrange(50_000) for _ in range(12))
        pages = tuple(PageId(page) for page in range(info.shape.layout.num_pages_for(len(prompt) - 1)))
        prefillers = [name for name in sorted(self._infos) if self._infos[name].role == Role.PREFILL]
        return wire.PrefillRequest(
            request=self._request(), source_replica=self._one_of(prefillers or [PREFILLER]), target_replica=DECODER,
            target_incarnation=self.links.incarnation, shape_digest=info.shape.digest(), seed=self._number(),
            prompt=prompt, start_token=0, target_pages=pages, num_nics=1,
            immediates=tuple(Immediate(self._random.getrandbits(24) << 7) for _ in range(info.shape.tp)), lease_s=10.0,
            verify=self._random.random() < 0.5,
        )  # fmt: skip

    def _faults(self, ticket: wire.PrefillRequest) -> list[dict[str, object]]:
        return [
            {"prompt": (self._number(), *ticket.prompt[1:])},
            {"prompt": (self._one_of([-1, 50_000, 2**40]), *ticket.prompt[1:])},
            {"prompt": self._prompt()},
            {"start_token": self._number()},
            {"target_pages": (*ticket.target_pages[1:], PageId(self._number()))},
            {"immediates": self._immediates()},
            {"num_nics": self._one_of([2, 2**40])},
            {"lease_s": self._float()},
            {"target_incarnation": Incarnation("a.1")},
            {"target_replica": self._replica()},
            {"source_replica": self._replica()},
        ]

    def _news(self) -> wire.Message:
        """Of a ticket that it holds, or of somebody else's."""
        request, immediate = self._request(), self._immediates()[0]
        of = [*self._tickets[-5:], *self._cluster.tickets[-5:]]
        if of and self._random.random() < 0.8:
            ticket = self._one_of(of)
            request, immediate = ticket.request, ticket.immediates[0]
        pieces = tuple(self._number() for _ in range(self._one_of([0, 1, 1, 2, 4])))
        news: list[wire.Message] = [
            wire.PrefillAccepted(request=request, immediate=immediate),
            wire.PrefillRejected(request=request, immediate=immediate, code="", reason="no"),
            wire.PrefillEnded(
                request=request, immediate=immediate, num_cached_tokens=self._number(), compute_s=self._float()
            ),
            wire.PrefillDigests(request=request, immediate=immediate, digests=pieces),
            wire.PrefillStopped(request=request, immediate=immediate, num_pieces=pieces, reason="no"),
        ]  # fmt: skip
        return self._one_of(news)

    def _cancel_prefill(self) -> wire.CancelPrefill:
        news = self._cluster.tickets[-5:]
        if news and self._random.random() < 0.8:
            ticket = self._one_of(news)
            return wire.CancelPrefill(request=ticket.request, immediate=ticket.immediates[0])
        return wire.CancelPrefill(request=self._request(), immediate=self._immediates()[0])

    def _handshake(self) -> wire.Message:
        return self._one_of([wire.Proof(mac=b""), wire.Refusal(code="", reason="no")])
