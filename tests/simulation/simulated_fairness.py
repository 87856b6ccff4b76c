"""How long a prompt may wait in a scheduler for its next tokens, and for all of them.

Every step gives half of its `chunk_tokens` (whole pages, at least one) to the sequence that has waited longest. Of n
sequences that hold a slot, each of the others can have waited longer only once before it is one's turn. So nobody is
left out of more than n - 1 steps in a row, and a prompt with p tokens to compute is done within

    n * (ceil(p / g) + 1) steps, where g = max(page_tokens, chunk_tokens // 2 in whole pages)

however long the others are (its first turn may only fill a page that was begun), and however many short ones come and
are preferred for the other half. n is at most `max_sequences`. A sequence that is preempted begins anew.
"""

from __future__ import annotations

from collections.abc import Iterator

from pdd.base.ids import SequenceId
from pdd.daemon.replica_set import ReplicaSet
from pdd.engine.plan import StepPlan


class Fairness:
    def __init__(self, one: ReplicaSet, chunk_tokens: int, max_sequences: int) -> None:
        self._set = one
        self._max_sequences = max_sequences
        page_tokens = one.layout.page_tokens
        self._turn_tokens = max(page_tokens, chunk_tokens // 2 // page_tokens * page_tokens)
        self._waits: dict[SequenceId, _Wait] = {}
        """Not by request: the next handoff of a request whose writes failed is a sequence of its own."""

    def planned(self, plan: StepPlan) -> Iterator[str]:
        """A sentence for each prompt that has waited too long."""
        scheduler = self._set.scheduler
        waits = self._waits
        self._waits = {}
        if not plan.step.rows:
            self._waits = waits
            return
        for sequence in scheduler._running():
            if sequence.decoding or not sequence.num_remaining:
                continue
            if sequence.last_step == plan.step.number and sequence.request not in plan.requests:
                continue  # it came while the step was announced: a write that had failed ended another one
            wait = waits.get(sequence.id)
            if wait is None or sequence.request in plan.started:
                num_turns = -(-sequence.num_remaining // self._turn_tokens) + 1
                wait = _Wait(self._max_sequences * num_turns)
            self._waits[sequence.id] = wait
            wait.num_steps += 1
            wait.num_left_out = 0 if sequence.request in plan.requests else wait.num_left_out + 1
            if wait.num_left_out >= self._max_sequences:
                yield f"{sequence.request} is left out of {wait.num_left_out} steps, among {self._max_sequences}"
            if wait.num_steps > wait.most_steps:
                yield f"{sequence.request} has {sequence.num_remaining} tokens left after {wait.num_steps} steps"


class _Wait:
    def __init__(self, most_steps: int) -> None:
        self.most_steps = most_steps
        self.num_steps = 0
        self.num_left_out = 0
