"""Every message between daemons, versioned as a whole by PROTOCOL.

A link first exchanges `Hello`, `Proof` and (when both fit) `Announce` (see link.py); then come, in a request's order:

    frontend -> decoder      Submit, Cancel
    decoder  -> frontend     Output
    decoder  -> prefiller    Grant (once a link), PrefillRequest, CancelPrefill
    prefiller -> decoder     PrefillAccepted | PrefillRejected, PrefillEnded, PrefillDigests, PrefillStopped
    both                     Load with each heartbeat
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdd.base.ids import Immediate, Incarnation, NodeName, PageId, ReplicaName, RequestId
from pdd.lifecycle.request import GenerateRequest, TokenOutput
from pdd.memory.shape import KvShape

PROTOCOL = 3
"""Raised with every change that an older daemon would misread."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Base of all frames."""


class Hello(Message, frozen=True):
    """First frame of each side, in clear: who I am and a challenge."""

    protocol: int
    cluster: str
    node: NodeName
    incarnation: Incarnation
    nonce: bytes
    """32 random bytes, new for each link."""


class Proof(Message, frozen=True):
    """HMAC-SHA256 by the cluster key over both hellos and the side: the peer has the key, now."""

    mac: bytes


class Refusal(Message, frozen=True):
    """Last frame before the link is closed: why."""

    code: str
    reason: str


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    fabric_provider: str


class ReplicaInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer must know of a replica to send it work."""

    name: ReplicaName
    """Of a replica set: ranks that hold a whole KV cache together. A replica with dp > 1 has several, each with pages
    and requests of its own; to a peer each is a replica to choose."""
    role: str
    model_digest: str
    """Over the packed model's config and weights: equal for equal models."""
    shape: KvShape
    ranks: tuple[RankInfo, ...]
    max_sequences: Annotated[int, Meta(ge=1)]


class ReplicaLoad(msgspec.Struct, frozen=True, kw_only=True):
    name: ReplicaName
    ready: bool
    free_pages: int
    num_queued: int
    num_running: int
    queued_tokens: int
    """Prompt tokens that are waiting or being prefilled."""
    late: bool = False
    """Its executors have not answered for a while: they are in a long step, or stuck."""


class Announce(Message, frozen=True):
    """The replicas of the sender that are up; sent after the handshake and at each change."""

    replicas: tuple[ReplicaInfo, ...]


class Load(Message, frozen=True):
    """Sent as the heartbeat."""

    sequence: int
    replicas: tuple[ReplicaLoad, ...]


class Submit(Message, frozen=True):
    replica: ReplicaName
    request: GenerateRequest
    reason: str = ""
    """Why it is asked again, of another replica; empty for the first attempt."""


class Output(Message, frozen=True):
    output: TokenOutput


class Cancel(Message, frozen=True):
    request: RequestId
    stopped: bool
    """True: a stop string ended it (that is success). False: nobody wants the answer any more."""


class Grant(Message, frozen=True):
    """The sender's decode rank lets the receiving incarnation write into its arena."""

    replica: ReplicaName
    rank: Annotated[int, Meta(ge=0)]
    address: bytes
    """Of the rank's port: for each NIC a key and an endpoint, made for that incarnation alone."""


class PrefillRequest(Message, frozen=True):
    """The ticket: prefill `prompt` without its last token and write the KV from position `start_token` on to me."""

    request: RequestId
    source_replica: ReplicaName
    target_replica: ReplicaName
    target_incarnation: Incarnation
    shape_digest: str
    """Of the target's shape, so that both plan the same pieces."""
    seed: int
    """Chooses among source ranks that hold the same heads. A decoder that numbers its tickets to a prefiller loads that
    one's ranks evenly."""
    prompt: tuple[int, ...]
    start_token: int
    """First position that the target lacks; a multiple of its page_tokens."""
    target_pages: tuple[PageId, ...]
    """The same pages on every target rank."""
    immediates: Annotated[tuple[Immediate, ...], Meta(min_length=1)]
    """For each target rank the count that it has armed; the first names the handoff in every other message."""
    lease_s: float
    verify: bool = False
    """The target wants `PrefillDigests`."""


class PrefillAccepted(Message, frozen=True):
    request: RequestId
    immediate: Immediate


class PrefillRejected(Message, frozen=True):
    """Nothing was and nothing will be written for this ticket."""

    request: RequestId
    immediate: Immediate
    code: str
    reason: str
    retry_after_s: Annotated[float, Meta(ge=0, le=3600)] | None = None
    """The prefiller is only full: when it may have room."""


class PrefillEnded(Message, frozen=True):
    """The last chunk has been computed: what is not yet there is on its way. Tells the story; never means ready."""

    request: RequestId
    immediate: Immediate
    num_cached_tokens: int
    compute_s: float


class PrefillDigests(Message, frozen=True):
    """What the pages hold at the source, for each leg of the plan: the target compares. See transfer/digest.py."""

    request: RequestId
    immediate: Immediate
    digests: tuple[int, ...]


class CancelPrefill(Message, frozen=True):
    request: RequestId
    immediate: Immediate


class PrefillStopped(Message, frozen=True):
    """After CancelPrefill, a failure or a lease that ran out: no more will be posted; `num_pieces` were."""

    request: RequestId
    immediate: Immediate
    num_pieces: tuple[int, ...]
    """For each target rank, from all source ranks together."""
    reason: str
    failed: bool = False
    """Writes failed: some of the pieces may never arrive. The target need not wait for them: it closes its keys."""


HandoffMessage = PrefillAccepted | PrefillRejected | PrefillEnded | PrefillDigests | PrefillStopped
"""What a prefiller says about a ticket to the decoder that sent it."""

AnyMessage = (
    Hello
    | Proof
    | Refusal
    | Announce
    | Load
    | Submit
    | Output
    | Cancel
    | Grant
    | PrefillRequest
    | PrefillAccepted
    | PrefillRejected
    | PrefillEnded
    | PrefillDigests
    | CancelPrefill
    | PrefillStopped
)
