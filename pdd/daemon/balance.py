"""Which replica serves a request, and why: pure choices over what is known of each.

One that may be stuck comes last; then less waiting wins. Among equals the prompt's first tokens decide (rendezvous
hashing), so that prompts that share a beginning meet the same prefix cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import msgspec

from pdd.base.ids import ReplicaName

_AFFINITY_TOKENS = 64


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    name: ReplicaName
    num_tokens: int
    """What its KV memory holds in all."""
    free_pages: int
    page_tokens: int
    num_queued: int
    num_running: int
    queued_tokens: int
    """Prompt tokens that wait or are being prefilled."""
    max_sequences: int
    late: bool = False
    """Perhaps it is stuck: others come first."""


class Choice(msgspec.Struct, frozen=True):
    name: ReplicaName
    reason: str


def choose_decoder(candidates: Sequence[Candidate], prompt: Sequence[int]) -> Choice | None:
    """Prefers replicas with room for the prompt now, then the least loaded. None without candidates."""

    def cost(it: Candidate) -> tuple[bool, bool, float, bytes]:
        return it.late, it.free_pages * it.page_tokens < len(prompt), _load(it), _distance(it, prompt)

    best = min(candidates, key=cost, default=None)
    if best is None:
        return None
    return Choice(best.name, f"{best.num_queued} queued, {best.num_running} running, {best.free_pages} pages free")


def choose_prefiller(candidates: Sequence[Candidate], prompt: Sequence[int]) -> Choice | None:
    """Prefers the fewest prompt tokens waiting. None without candidates."""
    best = min(candidates, key=lambda it: (it.late, it.queued_tokens, _distance(it, prompt)), default=None)
    return None if best is None else Choice(best.name, f"{best.queued_tokens} prompt tokens queued there")


def _load(candidate: Candidate) -> float:
    return (candidate.num_queued + candidate.num_running) / candidate.max_sequences


def _distance(candidate: Candidate, prompt: Sequence[int]) -> bytes:
    beginning = ",".join(map(str, prompt[:_AFFINITY_TOKENS]))
    return hashlib.blake2b(f"{candidate.name}|{beginning}".encode(), digest_size=8).digest()
