"""Which tokens the next step computes: continuous batching with chunked prefill over one replica's sequences.

A sequence is added when it has pages (admission.py) and, where another replica prefilled it, its KV has arrived. Then
the daemon turns, one step in flight at a time:

    schedule() -> plan -> executors -> complete(plan, sampled) -> outcomes

Each step takes every decoding sequence (one token each) and then prompt tokens, as many as chunk_tokens allows.
Pages are found oldest sequence first; where they run out the youngest sequence loses its own and starts again later,
so the oldest always gets on and all finish.
"""

from __future__ import annotations

from pdd.base.errors import InvariantBroken, OutOfPages
from pdd.base.ids import RequestId, SequenceId
from pdd.engine.plan import (
    Failed,
    Outcome,
    Preempted,
    PrefillChunk,
    PrefillComputed,
    Removed,
    StepPlan,
    TokenSampled,
)
from pdd.engine.protocol import Row, Sampled, StartSequence, Step
from pdd.engine.sequence import Sequence
from pdd.lifecycle.request import FinishReason
from pdd.memory.pool import PagePool


class Scheduler:
    """`chunk_tokens`: most prompt tokens in a step (at least a page). `max_sequence_tokens`: prompt and answer."""

    def __init__(self, pool: PagePool, *, num_layers: int, chunk_tokens: int, max_sequence_tokens: int) -> None:
        self._pool = pool
        self._num_layers = num_layers
        self._chunk_tokens = max(chunk_tokens, pool.page_tokens)
        self._max_sequence_tokens = max_sequence_tokens
        self._sequences: dict[RequestId, Sequence] = {}
        """By age: in the order of `add`, preempted or not."""
        self._preempted: set[RequestId] = set()
        self._forget: list[SequenceId] = []
        """Sequences that the executors know and need no longer."""
        self._news: list[Outcome] = []
        """Outcomes that await the next `complete`."""
        self._in_flight: StepPlan | None = None
        self._num_steps = 0
        self._num_layers_counted = 0

    @property
    def num_running(self) -> int:
        return len(self._sequences) - len(self._preempted)

    @property
    def num_preempted(self) -> int:
        return len(self._preempted)

    @property
    def num_wanted_pages(self) -> int:
        """Pages that preempted sequences wait for; nobody new should be admitted to them."""
        return sum(self._pool.num_pages_for(self._sequences[request].goal) for request in self._preempted)

    @property
    def num_prefill_tokens(self) -> int:
        """Tokens that sequences which are not decoding have yet to compute."""
        return sum(sequence.num_remaining for sequence in self._sequences.values() if not sequence.decoding)

    def add(self, sequence: Sequence) -> None:
        """Takes a sequence whose pages the pool holds for its request. KV that is in place is published."""
        if sequence.request in self._sequences:
            raise InvariantBroken(f"{sequence.request} is scheduled already")
        self._pool.publish(sequence.request, sequence.tokens, sequence.num_computed)
        sequence.last_step = self._num_steps - 1
        self._sequences[sequence.request] = sequence

    def remove(self, request: RequestId) -> bool:
        """Nobody wants the sequence any more; unknown ones are fine. True: it is in the step in flight, so its pages
        must stay until `complete` says Removed. False: they may be released now."""
        in_step = self._in_flight is not None and request in self._in_flight.requests
        sequence = self._sequences.pop(request, None)
        if sequence is not None:
            self._preempted.discard(request)
            self._leave(sequence)
        self._news = [outcome for outcome in self._news if outcome.request != request]
        if in_step:
            self._news.append(Removed(request))
        return in_step

    def schedule(self) -> StepPlan | None:
        """The next step, or None when there is nothing to do until a sequence is added or pages are released.

        Raises InvariantBroken while a step is in flight.
        """
        if self._in_flight is not None:
            raise InvariantBroken(f"step {self._in_flight.step.number} is still in flight")
        self._grow()
        self._restart()
        running = self._running()
        shares = [(sequence, 1) for sequence in running if sequence.decoding]
        shares += self._share_chunk(
            [sequence for sequence in running if sequence.num_remaining and not sequence.decoding]
        )
        plan = self._plan(shares, [sequence for sequence in running if sequence.num_remaining == 0])
        if not (plan.step.rows or plan.chunks or plan.step.release or self._news):
            return None
        self._in_flight = plan
        self._forget = []
        self._num_steps += 1
        if plan.step.rows:
            self._num_layers_counted += self._num_layers
        return plan

    def complete(self, plan: StepPlan, sampled: list[Sampled]) -> list[Outcome]:
        """The step has been computed; `sampled` has one entry for each row that samples, in any order.

        Raises InvariantBroken when the plan is not the one in flight or the samples are not its own; nothing has
        changed then.
        """
        if plan is not self._in_flight:
            raise InvariantBroken(f"step {plan.step.number} is not in flight")
        by_sequence = {one.sequence: one for one in sampled}
        expected = {row.sequence for row in plan.step.rows if row.sample}
        if by_sequence.keys() != expected or len(sampled) != len(expected):
            raise InvariantBroken(
                f"step {plan.step.number} samples for sequences {sorted(expected)}, "
                f"the executor answered for {sorted(one.sequence for one in sampled)}"
            )
        self._in_flight = None
        outcomes, self._news = self._news, []
        for request, row in zip(plan.requests, plan.step.rows, strict=True):
            sequence = self._sequences.get(request)
            if sequence is None:
                continue  # removed meanwhile
            sequence.num_computed = row.start + len(row.tokens)
            self._pool.publish(request, sequence.tokens, sequence.num_computed)
            if row.sample:
                outcomes.append(self._sampled(sequence, by_sequence[row.sequence]))
        for chunk in plan.chunks:
            if chunk.is_last and chunk.request in self._sequences:
                self._leave(self._sequences.pop(chunk.request))
                outcomes.append(PrefillComputed(chunk.request))
        return outcomes

    def _running(self) -> list[Sequence]:
        return [sequence for request, sequence in self._sequences.items() if request not in self._preempted]

    def _grow(self) -> None:
        """Pages for the next token of every running sequence, oldest first; the youngest pay for it."""
        for sequence in self._running():
            missing = self._pool.num_pages_for(sequence.goal) - len(sequence.pages)
            if missing <= 0 or sequence.request in self._preempted or self._fails(sequence):
                continue
            while sequence.request not in self._preempted:
                try:
                    sequence.pages += self._pool.extend(sequence.request, missing)
                    break
                except OutOfPages:
                    self._preempt(self._running()[-1])

    def _restart(self) -> None:
        """Gives pages back to preempted sequences, oldest first; none passes another. A page for each running sequence
        stays available, or the next steps would only preempt them again."""
        for sequence in [self._sequences[request] for request in self._sequences if request in self._preempted]:
            try:
                allocation = self._pool.allocate(
                    sequence.request, sequence.tokens, sequence.goal, reserve_pages=self.num_running
                )
            except OutOfPages:
                return
            sequence.gain_pages(allocation.pages, allocation.num_cached_tokens)
            self._preempted.remove(sequence.request)

    def _preempt(self, sequence: Sequence) -> None:
        self._pool.release(sequence.request)
        self._leave(sequence)
        sequence.lose_pages()
        self._preempted.add(sequence.request)
        self._news.append(Preempted(sequence.request))

    def _fails(self, sequence: Sequence) -> bool:
        """Gives up a sequence that has outgrown the whole pool: no preemption could help it."""
        num_pages = self._pool.num_pages_for(sequence.goal)
        if num_pages <= self._pool.num_pages:
            return False
        self._leave(self._sequences.pop(sequence.request))
        reason = f"{sequence.goal} tokens need {num_pages} pages of KV cache; the replica has {self._pool.num_pages}"
        self._news.append(Failed(sequence.request, reason))
        return True

    def _leave(self, sequence: Sequence) -> None:
        if sequence.num_pages_sent is not None:
            self._forget.append(sequence.id)

    def _share_chunk(self, prefilling: list[Sequence]) -> list[tuple[Sequence, int]]:
        """Splits the step's prompt tokens. Half goes to the sequence that has waited longest, so that nobody starves;
        the rest to those with the least left, so that short prompts need not wait for long ones to end.

        Shares end at the sequence's goal or on a page boundary.
        """
        if not prefilling:
            return []
        left = self._chunk_tokens
        shares = dict.fromkeys(prefilling, 0)

        def give(sequence: Sequence, most: int) -> None:
            nonlocal left
            start = sequence.num_computed + shares[sequence]
            end = min(sequence.goal, start + most)
            if end < sequence.goal:
                end = max(start, end - end % self._pool.page_tokens)
            shares[sequence] += end - start
            left -= end - start

        give(min(prefilling, key=lambda sequence: sequence.last_step), max(left // 2, self._pool.page_tokens))
        for sequence in sorted(prefilling, key=lambda sequence: sequence.num_remaining):
            give(sequence, left)
        return [(sequence, share) for sequence, share in shares.items() if share]

    def _plan(self, shares: list[tuple[Sequence, int]], cached: list[Sequence]) -> StepPlan:
        """`cached`: sequences of a prefill replica that need no computing; they get a chunk but no row."""
        starts, rows, chunks = [], [], []
        for sequence, num_tokens in shares:
            end = sequence.num_computed + num_tokens
            if sequence.sampling is None:
                chunks.append(self._chunk(sequence, end))
            if sequence.num_pages_sent is None:
                starts.append(sequence)
            rows.append(self._row(sequence, end))
            sequence.last_step = self._num_steps
        chunks += [self._chunk(sequence, sequence.goal) for sequence in cached]
        return StepPlan(
            step=Step(
                number=self._num_steps, release=self._forget, start=[_start(sequence) for sequence in starts], rows=rows
            ),
            requests=tuple(sequence.request for sequence, _ in shares),
            started=tuple(sequence.request for sequence in starts),
            counter_base=self._num_layers_counted,
            chunks=tuple(chunks),
        )

    def _row(self, sequence: Sequence, end: int) -> Row:
        new_pages = [] if sequence.num_pages_sent is None else sequence.pages[sequence.num_pages_sent :]
        sequence.num_pages_sent = len(sequence.pages)
        return Row(
            sequence=sequence.id,
            start=sequence.num_computed,
            tokens=sequence.tokens[sequence.num_computed : end],
            new_pages=[int(page) for page in new_pages],
            sample=sequence.sampling is not None and end == sequence.num_tokens,
        )

    def _chunk(self, sequence: Sequence, end: int) -> PrefillChunk:
        start = 0 if sequence.num_pages_sent is None else sequence.num_computed
        return PrefillChunk(
            request=sequence.request,
            start=start,
            end=end,
            is_last=end == sequence.goal,
            armed=end > sequence.num_computed,
            pages=tuple(sequence.pages[start // self._pool.page_tokens : self._pool.num_pages_for(end)]),
        )

    def _sampled(self, sequence: Sequence, sampled: Sampled) -> TokenSampled:
        sequence.tokens.append(sampled.token)
        finish = self._finish(sequence)
        if finish is not None:
            self._leave(self._sequences.pop(sequence.request))
        return TokenSampled(
            request=sequence.request,
            token=sampled.token,
            logprobs=sampled.logprobs,
            finish=finish,
            stop_token=sampled.token if finish is FinishReason.STOP else None,
        )

    def _finish(self, sequence: Sequence) -> FinishReason | None:
        """Why the sequence ends with its last token, if it does. A stop token counts from `min_tokens` on."""
        sampling = sequence.sampling
        if sampling is None:
            return None
        if sequence.num_output >= sampling.min_tokens and sequence.tokens[-1] in sampling.stop_token_ids:
            return FinishReason.STOP
        if sequence.num_output >= sampling.max_tokens or sequence.num_tokens >= self._max_sequence_tokens:
            return FinishReason.LENGTH
        return None


def _start(sequence: Sequence) -> StartSequence:
    return StartSequence(
        sequence=sequence.id,
        prompt=list(sequence.prompt),
        output=sequence.output,
        pages=[int(page) for page in sequence.pages],
        sampling=sequence.sampling,
    )
