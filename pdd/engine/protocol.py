"""What a daemon and its executor processes say to each other over a Unix socket pair.

Each frame is 4 bytes of length (little endian) and a msgpack body. The daemon plans, the executor computes: one `Step`
down, one `StepDone` up, strictly in turn. A step of nothing only asks whether the executor is there. The executor owns
the arena; `ExecutorReady` carries its descriptors.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from pdd.base.ids import SequenceId
from pdd.lifecycle.request import SamplingParams, TokenLogprobs
from pdd.memory.layout import KvLayout


class ExecutorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """First frame, daemon to executor: everything that it needs to load the model and make its arena."""

    replica: str
    rank: int
    """dp_rank * tp + tp_rank, among the dp * tp ranks of the replica."""
    tp: int
    dp: int
    ep: int
    """Ranks that share the experts of a MoE layer: 1, or dp * tp."""
    rendezvous: str
    """Path of a file that the ranks of this replica find each other by (torch.distributed's file store); unused when
    there is one rank."""
    role: str
    model_dir: str
    """Packed model directory (engine/pack.py)."""
    dtype: str
    page_tokens: int
    kv_bytes: int
    chunk_tokens: int
    max_sequences: int
    cores: tuple[int, ...]
    threads: int
    num_wakes: int
    """Eventfds that a set's lead provides: one for each fabric port of the set, so `tp` times the NICs of a rank."""


class ExecutorReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The model is loaded. Descriptors ride along (SCM_RIGHTS): the rank's arena (memfd) and, from tp rank 0 only, also
    the layer counter (memfd of one page; a little-endian u64 at offset 0: layers whose KV is in place on all tp ranks
    since the start, never reset), and `num_wakes` eventfds that the executor writes after each raise of the counter.
    There is one for each fabric port, for whoever waits on an eventfd also takes the news away from the others."""

    layout: KvLayout
    load_s: float
    resident_bytes: int


class StartSequence(msgspec.Struct, frozen=True, array_like=True):
    """A sequence that the next rows name for the first time (or again, after a preemption)."""

    sequence: SequenceId
    prompt: list[int]
    output: list[int]
    """Tokens sampled before a preemption."""
    pages: list[int]
    sampling: SamplingParams | None
    """None where this replica never samples it (prefill role)."""


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Run `tokens` at positions `start`, `start + 1`, ... of a sequence."""

    sequence: SequenceId
    start: int
    tokens: list[int]
    new_pages: list[int]
    """Pages to append to the sequence's page table before this row runs."""
    sample: bool
    """Sample one token after the row's last position."""


class Step(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    release: list[SequenceId]
    """Sequences whose state the executor may forget; applied first."""
    start: list[StartSequence]
    rows: list[Row]
    """May be empty: then only the bookkeeping above is done and the counter does not move."""
    joint: bool = False
    """Other data-parallel ranks compute in this step: take part in its collectives even without rows."""


class Sampled(msgspec.Struct, frozen=True, array_like=True):
    sequence: SequenceId
    token: Annotated[int, Meta(ge=0, lt=2**31)]
    logprobs: TokenLogprobs | None


class StepDone(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    number: int
    sampled: list[Sampled]
    compute_s: float


class ExecutorFailed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The executor cannot go on and exits. `message` is for the operator."""

    message: str
    exit_code: int


FromExecutor = ExecutorReady | StepDone | ExecutorFailed
