"""Where HTTP requests enter the cluster: picks a decode replica, here or on another node, and streams its outputs back.

Local and remote replicas are asked with the same messages; to itself a node delivers them without a link.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

import msgspec

from pdd.base.errors import NoPath
from pdd.base.ids import NodeName, ReplicaName, RequestId
from pdd.daemon.balance import choose_decoder
from pdd.daemon.peers import PeerBook
from pdd.lifecycle.events import error_info
from pdd.lifecycle.request import GenerateRequest, TokenOutput
from pdd.topology.model import Role
from pdd.wire import messages as wire

_DECODE_ROLES = frozenset({Role.DECODE.value, Role.COLOCATED.value})


class _Stream(msgspec.Struct):
    node: NodeName
    replica: ReplicaName
    outputs: asyncio.Queue[TokenOutput]


class Frontend:
    """The requests that came in over this node's HTTP port and have not ended."""

    def __init__(self, peers: PeerBook, send: Callable[[NodeName, wire.Message], bool]) -> None:
        self._peers = peers
        self._send = send
        self._streams: dict[RequestId, _Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[TokenOutput, None]:
        """Yields outputs until one is `last`; closing it early cancels the request. Raises NoPath."""
        stream = self._open(request)
        self._streams[request.id] = stream
        last = False
        try:
            while not last:
                output = await stream.outputs.get()
                last = output.last
                yield output
        finally:
            self._streams.pop(request.id, None)
            if not last:
                self._send(stream.node, wire.Cancel(request=request.id, stopped=False))

    def stop(self, request: RequestId) -> None:
        """A stop string was found: success."""
        if stream := self._streams.get(request):
            self._send(stream.node, wire.Cancel(request=request, stopped=True))

    def output(self, node: NodeName, output: TokenOutput) -> None:
        stream = self._streams.get(output.request)
        if stream is not None and stream.node == node:
            stream.outputs.put_nowait(output)

    def peer_down(self, node: NodeName, reason: str) -> None:
        """What it was decoding is lost."""
        for request, stream in self._streams.items():
            if stream.node == node:
                error = NoPath(f"the link to decode node {node} was lost: {reason}")
                stream.outputs.put_nowait(TokenOutput(request=request, error=error_info(error)))

    def _open(self, request: GenerateRequest) -> _Stream:
        candidates = self._peers.candidates(_DECODE_ROLES)
        choice = choose_decoder(candidates, request.prompt)
        owner = self._peers.owner(choice.name) if choice else None
        if choice is None or owner is None:
            raise NoPath("no decode replica is reachable")
        if not self._send(owner.node, wire.Submit(replica=choice.name, request=request)):
            raise NoPath(f"the link to decode node {owner.node} just went down")
        return _Stream(owner.node, choice.name, asyncio.Queue())
