"""Where HTTP requests enter the cluster: picks a decode replica, here or on another node, and streams its outputs back.

Local and remote replicas are asked with the same messages; to itself a node delivers them without a link. A request
whose replica is lost before the client has got anything is asked of another one, and begins anew there. One whose
replica is full is asked of a few others before the client is sent away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Set

import msgspec
import structlog

from pdd.base.clock import Clock
from pdd.base.errors import GoingDown, NoPath, QueueFull, ReplicaFailed
from pdd.base.ids import NodeName, ReplicaName, RequestId
from pdd.daemon.balance import choose_decoder
from pdd.daemon.metrics import Metrics
from pdd.daemon.peers import PeerBook
from pdd.lifecycle.events import error_info
from pdd.lifecycle.request import ErrorInfo, GenerateRequest, TokenOutput
from pdd.topology.model import Role
from pdd.wire import messages as wire

log = structlog.get_logger(__name__)

_DECODE_ROLES = frozenset({Role.DECODE.value, Role.COLOCATED.value})
_LOST = frozenset(error.code for error in (NoPath, ReplicaFailed, GoingDown))
"""What a replica answers that cannot serve the request, whatever the request is: another one may."""
_MAX_ASKED = 4
"""Replicas that are asked for a request before the client is told that they are full."""


class _Stream(msgspec.Struct):
    request: GenerateRequest
    deadline_s: float
    outputs: asyncio.Queue[TokenOutput]
    asked: RequestId
    """What the present replica calls it. Each attempt has an id of its own: the one before may still be draining."""
    node: NodeName
    tried: list[ReplicaName]
    """The last of them is the present one."""
    num_lost: int = 0
    """How many of them were lost; the others were full."""
    has_tokens: bool = False
    """Of the present attempt, or of one whose tokens the consumer has not been told to forget yet."""
    anew: bool = False
    """It was moved, and the consumer has tokens of an earlier attempt."""
    shown: bool = False
    """The client has got something: there is no way back."""


class Frontend:
    """The requests that came in over this node's HTTP port and have not ended. `retries`: how often one of which the
    client has got nothing is asked of another replica when its own is lost. `timeout_s`: the deadline of each."""

    def __init__(
        self,
        peers: PeerBook,
        send: Callable[[NodeName, wire.Message], bool],
        *,
        clock: Clock,
        metrics: Metrics,
        retries: int,
        timeout_s: float,
    ) -> None:
        self._peers = peers
        self._send = send
        self._clock = clock
        self._metrics = metrics
        self._retries = retries
        self._timeout_s = timeout_s
        self._streams: dict[RequestId, _Stream] = {}
        self._asked: dict[RequestId, _Stream] = {}
        """The same, by what their replicas call them."""

    def __len__(self) -> int:
        return len(self._streams)

    @property
    def asked(self) -> Set[RequestId]:
        """Requests whose answers are on their way to clients, as their replicas call them."""
        return self._asked.keys()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        """Yields outputs until one is `last`; closing it early cancels the request. Raises NoPath."""
        stream = self._open(request)
        last = False
        try:
            while not last:
                output = await stream.outputs.get()
                if output.error is not None and self._move(stream, output.error):
                    continue
                last = output.last
                yield self._told(stream, output)
        finally:
            del self._streams[request.id], self._asked[stream.asked]
            self._peers.unsent(stream.tried[-1], stream.asked)
            if not last:
                self._send(stream.node, wire.Cancel(request=stream.asked, stopped=False))

    def _told(self, stream: _Stream, output: TokenOutput) -> TokenOutput:
        """As the consumer gets it, who knows of no attempts."""
        anew, stream.anew = stream.anew, False
        stream.has_tokens = bool(output.tokens) or (stream.has_tokens and not anew)
        return msgspec.structs.replace(output, request=stream.request.id, anew=anew)

    def shown(self, request: RequestId) -> None:
        """The client has got some of the answer: it cannot begin anew."""
        if stream := self._streams.get(request):
            stream.shown = True

    def stop(self, request: RequestId) -> None:
        """A stop string was found: success."""
        if stream := self._streams.get(request):
            self._send(stream.node, wire.Cancel(request=stream.asked, stopped=True))

    def output(self, node: NodeName, output: TokenOutput) -> None:
        stream = self._asked.get(output.request)
        if stream is not None and stream.node == node:
            stream.outputs.put_nowait(output)

    def peer_down(self, node: NodeName, reason: str) -> None:
        """What it was decoding is lost."""
        for asked, stream in self._asked.items():
            if stream.node == node:
                error = NoPath(f"the link to decode node {node} was lost: {reason}")
                stream.outputs.put_nowait(TokenOutput(request=asked, error=error_info(error)))

    def _open(self, request: GenerateRequest) -> _Stream:
        found = self._choose(request, [])
        if found is None:
            raise NoPath("no decode replica is reachable")
        node, replica = found
        if not self._send(node, wire.Submit(replica=replica, request=request)):
            raise NoPath(f"the link to decode node {node} just went down")
        deadline_s = self._clock.now_s() + (request.timeout_s or self._timeout_s)
        self._peers.sent(replica, request.id, len(request.prompt))
        stream = _Stream(request, deadline_s, asyncio.Queue(), request.id, node, [replica])
        self._streams[request.id] = self._asked[request.id] = stream
        return stream

    def _move(self, stream: _Stream, error: ErrorInfo) -> bool:
        """Asks another replica in the place of one that is lost or full. False: that is not possible or not allowed."""
        left_s = stream.deadline_s - self._clock.now_s()
        if stream.shown or left_s <= 0 or not self._may_move(stream, error):
            return False
        found = self._choose(stream.request, stream.tried)
        if found is None:
            return False
        node, replica = found
        asked = RequestId(f"{stream.request.id}~{len(stream.tried)}")
        request = msgspec.structs.replace(stream.request, id=asked, timeout_s=left_s)
        reason = f"{stream.tried[-1]} had it before: {error.message}"
        if not self._send(node, wire.Submit(replica=replica, request=request, reason=reason)):
            return False
        log.warning("request moved", request=stream.request.id, moved_as=asked, to=replica, reason=reason)
        self._metrics.requests_moved.labels(error.code).inc()
        del self._asked[stream.asked]
        self._peers.unsent(stream.tried[-1], stream.asked)
        self._peers.sent(replica, asked, len(request.prompt))
        self._asked[asked] = stream
        stream.num_lost += error.code in _LOST
        stream.anew = stream.has_tokens
        stream.asked, stream.node = asked, node
        stream.tried.append(replica)
        return True

    def _may_move(self, stream: _Stream, error: ErrorInfo) -> bool:
        if error.code == QueueFull.code:
            return len(stream.tried) < _MAX_ASKED
        return error.code in _LOST and stream.num_lost < self._retries

    def _choose(self, request: GenerateRequest, tried: Collection[ReplicaName]) -> tuple[NodeName, ReplicaName] | None:
        candidates = [it for it in self._peers.candidates(_DECODE_ROLES) if it.name not in tried]
        choice = choose_decoder(candidates, request.prompt)
        owner = self._peers.owner(choice.name) if choice else None
        return (owner.node, choice.name) if choice and owner else None
