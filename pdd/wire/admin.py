"""What pdctl and a daemon say to each other over the admin socket (a Unix socket, mode 0600).

One JSON object a line each way: an AdminRequest, then an AdminReply; a connection may carry many, in turn. `result` of
a reply is the JSON form of the struct that the command names below.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec


class AdminRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    command: str
    """status | requests | story | cancel | kv | peers | drain | resume"""
    request: str | None = None
    """For `story` and `cancel`: a request id, or a prefix of one that is unique."""


class AdminError(msgspec.Struct, frozen=True, kw_only=True):
    code: str
    message: str


class AdminReply(msgspec.Struct, frozen=True, kw_only=True):
    result: Any = None
    error: AdminError | None = None


class NicStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A NIC of a rank, and what went through it since the start."""

    rank: int
    """Tensor-parallel rank in the set."""
    nic: int
    host: str
    """The address that the rank's port binds there."""
    sent_bytes: int
    """KV, and what the measurement at the start wrote."""
    arrived_pieces: int
    failed_paths: int
    """Times that a path from this NIC to a peer's was given up, for a while."""


class ReplicaStatus(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    role: str
    state: str
    """starting | ready | failed | stopped"""
    reason: str
    num_queued: int
    num_running: int
    free_pages: int
    cached_pages: int
    quarantined_pages: int
    num_pages: int
    steps: int
    provider: str
    nics: tuple[NicStatus, ...]
    """Of all ranks; empty where nothing is handed over."""
    copied_bytes: int
    """KV that came from prefillers of this machine as copies, since the start."""
    failed_copies: int
    """Times that copies to a decoder of this machine were given up, for a while: the NICs carried what followed."""
    fabric_gigabytes_per_s: float | None
    """Measured at start: a loopback write to itself; None where it could not be."""


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """`status`."""

    node: str
    incarnation: str
    version: str
    pid: int
    uptime_s: float
    ready: bool
    reason: str
    model: str
    http: str | None
    draining: bool
    unfinished: int
    """Requests of both sides and streams to clients: what a drain waits for."""
    replicas: tuple[ReplicaStatus, ...]
    counters: dict[str, int]
    """Decisions and faults since the start: requests by end, handoffs by outcome, local prefills, strays, ..."""


class RequestRow(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `requests`: those that have not ended, and the latest that have."""

    request: str
    side: str
    """decode | prefill"""
    state: str
    age_s: float
    state_s: float
    """Time in the present state; since the end for ended ones."""
    prompt_tokens: int
    output_tokens: int
    pages: int
    peer: str


class Requests(msgspec.Struct, frozen=True, kw_only=True):
    """`requests`."""

    requests: tuple[RequestRow, ...]


class StoryLine(msgspec.Struct, frozen=True, kw_only=True):
    at_s: float
    """Since the request was received."""
    state: str
    reason: str


class Story(msgspec.Struct, frozen=True, kw_only=True):
    """`story`: one request on this node (both sides where both are here)."""

    request: str
    side: str
    replica: str
    peer: str
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    lines: tuple[StoryLine, ...]
    seconds_in: dict[str, float]
    """Time in each state."""
    pieces: int
    """Moved; between equal shapes one for each page of each layer."""
    bytes: int
    gigabytes_per_s: float | None
    """bytes / (last arrival - first arrival)."""
    landed_before_prefill_end: float | None
    """Share of the bytes that were in place when the news of the prefill's end came: 0 to 1."""
    ready_after_prefill_end_s: float | None
    """From that news to ready; 0 where ready was first."""
    ttft_s: float | None


class Stories(msgspec.Struct, frozen=True, kw_only=True):
    stories: tuple[Story, ...]


class CancelResult(msgspec.Struct, frozen=True, kw_only=True):
    request: str
    state: str
    """Its state after the cancel."""


class PageOwner(msgspec.Struct, frozen=True, kw_only=True):
    owner: str
    pages: int
    quarantined: bool


class KvReport(msgspec.Struct, frozen=True, kw_only=True):
    """One replica of `kv`: num_pages = free + cached + owned + quarantined, where shared pages count once."""

    replica: str
    num_pages: int
    page_bytes: int
    """Of one layer."""
    num_layers: int
    free: int
    cached: int
    owned: int
    quarantined: int
    owners: tuple[PageOwner, ...]
    hit_tokens: int
    """Prompt tokens served from the prefix cache since the start, of `queried_tokens`."""
    queried_tokens: int
    problems: tuple[str, ...]
    """What the invariant checker found: empty in a healthy pool."""


class KvReports(msgspec.Struct, frozen=True, kw_only=True):
    replicas: tuple[KvReport, ...]


class PeerRow(msgspec.Struct, frozen=True, kw_only=True):
    node: str
    address: str
    state: str
    """up | connecting | refused"""
    reason: str
    incarnation: str
    silent_s: float
    replicas: tuple[str, ...]
    links: int
    """Links to it since the start: more than one means it came back."""
    way: str
    """How pages go to it: `copy`, or `2 of 2 paths`; empty while none have."""


class Peers(msgspec.Struct, frozen=True, kw_only=True):
    """`peers`."""

    peers: tuple[PeerRow, ...]


class DrainResult(msgspec.Struct, frozen=True, kw_only=True):
    """`drain` and `resume`."""

    draining: bool
    unfinished: int


def socket_path(run_dir: Path, node: str) -> Path:
    """Where a node's admin socket is."""
    return run_dir / f"{node}.sock"
