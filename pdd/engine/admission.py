"""The line in front of a replica's pages: a request waits here from its submission to its allocation.

First come, first served, with one exception: where the first in line lacks pages, a few smaller requests may pass it,
at most MAX_PASSES in all, so that it is delayed but never starved.

Nobody is admitted to pages that running sequences are expected to need, so that those seldom push each other out. With
the mean A of recent answers, a sequence whose prompt has p tokens and whose answer may have m is expected to hold

    ceil((p + min(m, k A)) / page_tokens) pages in the end, where k > 0 is the least whole number for which that is
    more than it has:

an answer that has outlived the mean is as likely as any to go on for that long again.

A request gets its pages when there are enough for its prompt and the growth of all, its own included. Growth is a guess
and no right: it bars only new requests, and it never bars the first in line when nothing runs. So somebody always gets
on.
"""

from __future__ import annotations

from collections import deque
from itertools import islice

import msgspec

from pdd.base.errors import BadRequest, InvariantBroken, OutOfPages, QueueFull
from pdd.base.ids import RequestId
from pdd.memory.pool import Allocation, PagePool

MAX_PASSES = 8
"""Requests that may be admitted ahead of an earlier one that lacks pages."""
LOOKAHEAD = 16
"""Requests in line that one `admit` tries; bounds its work however long the line is."""
RETRY_AFTER_S = (1.0, 60.0)
"""Bounds of what QueueFull advises; the lower one is used while nothing is known."""
NUM_RECENT = 32
"""Ends of requests that the rate is estimated from."""


FIRST_ANSWER_TOKENS = 256
"""The expected answer while nothing is known."""
ANSWER_WEIGHT = 1 / 16
"""Of the latest answer in the mean."""


class Admitted(msgspec.Struct, frozen=True):
    request: RequestId
    allocation: Allocation


class _Waiting:
    __slots__ = ("max_answer_tokens", "num_passes", "num_tokens", "prompt", "request")

    def __init__(self, request: RequestId, prompt: tuple[int, ...], num_tokens: int, max_answer_tokens: int) -> None:
        self.request = request
        self.prompt = prompt
        self.num_tokens = num_tokens
        self.max_answer_tokens = max_answer_tokens
        self.num_passes = 0


class Admission:
    """At most `max_sequences` requests hold a slot and pages; `max_queue` more may wait."""

    def __init__(self, pool: PagePool, *, max_sequences: int, max_queue: int) -> None:
        self._pool = pool
        self._max_sequences = max_sequences
        self._max_queue = max_queue
        self._line: dict[RequestId, _Waiting] = {}
        self._admitted: dict[RequestId, _Waiting] = {}
        self._mean_answer_tokens = float(FIRST_ANSWER_TOKENS)
        self._recent_ends_s: deque[float] = deque(maxlen=NUM_RECENT)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    @property
    def num_admitted(self) -> int:
        return len(self._admitted)

    @property
    def num_waiting_tokens(self) -> int:
        return sum(waiting.num_tokens for waiting in self._line.values())

    @property
    def mean_answer_tokens(self) -> float:
        """A of the formula above."""
        return self._mean_answer_tokens

    def learn(self, num_answer_tokens: int) -> None:
        """A request has been answered with so many tokens."""
        self._mean_answer_tokens += ANSWER_WEIGHT * (num_answer_tokens - self._mean_answer_tokens)

    def enqueue(self, request: RequestId, prompt: tuple[int, ...], num_tokens: int, max_answer_tokens: int) -> None:
        """Puts a request at the end of the line; it will get pages for the first `num_tokens` positions of `prompt`
        (all of them, or all but the last on a prefill replica) and grows by `max_answer_tokens` at most (0 there).

        Raises BadRequest when the whole pool would be too small, QueueFull when the line is full. Requests that find
        a free slot do not count as waiting, so `max_queue` may be 0.
        """
        if request in self._line or request in self._admitted:
            raise InvariantBroken(f"{request} stands in line or has been admitted already")
        num_pages = self._pool.num_pages_for(num_tokens)
        if num_pages > self._pool.num_pages:
            raise BadRequest(
                f"the prompt has {len(prompt)} tokens and needs {num_pages} pages of KV cache; this replica has "
                f"{self._pool.num_pages} of {self._pool.page_tokens} tokens each "
                f"({self._pool.num_pages * self._pool.page_tokens} tokens in all)",
                param="prompt",
            )
        if len(self._line) + len(self._admitted) >= self._max_queue + self._max_sequences:
            raise QueueFull(
                f"{len(self._admitted)} requests are running and {len(self._line)} are waiting; "
                f"at most {self._max_queue} may wait",
                retry_after_s=self._retry_after_s(),
            )
        self._line[request] = _Waiting(request, prompt, num_tokens, max_answer_tokens)

    def is_admitted(self, request: RequestId) -> bool:
        """Whether it holds a slot."""
        return request in self._admitted

    def withdraw(self, request: RequestId) -> bool:
        """Takes a request out of the line; False when it is not in it."""
        return self._line.pop(request, None) is not None

    def admit(self, wanted_pages: int = 0) -> list[Admitted]:
        """Gives pages and slots to those whose turn it is. `wanted_pages` (Scheduler.num_wanted_pages) are left for
        sequences that lost theirs: they come first."""
        admitted: list[Admitted] = []
        blocked: list[_Waiting] = []
        for waiting in list(islice(self._line.values(), LOOKAHEAD)):
            if len(self._admitted) >= self._max_sequences or any(w.num_passes >= MAX_PASSES for w in blocked):
                break
            reserve = wanted_pages + self._growth_pages(waiting)
            try:
                allocation = self._pool.allocate(waiting.request, waiting.prompt, waiting.num_tokens, reserve)
            except OutOfPages:
                blocked.append(waiting)
                continue
            for passed in blocked:
                passed.num_passes += 1
            del self._line[waiting.request]
            self._admitted[waiting.request] = waiting
            admitted.append(Admitted(waiting.request, allocation))
        return admitted

    def release_slot(self, request: RequestId, now_s: float) -> None:
        """The admitted request has ended, however it ended. Its pages are the caller's business."""
        if request not in self._admitted:
            raise InvariantBroken(f"{request} gives back a slot that it does not have")
        del self._admitted[request]
        self._recent_ends_s.append(now_s)

    def _growth_pages(self, candidate: _Waiting) -> int:
        """Pages that those who run are expected to need beyond theirs, and the candidate beyond its prompt."""
        num_pages = self._pool.num_pages_for(candidate.num_tokens)
        own = self._growth_of(candidate, num_pages)
        if not self._admitted:
            return min(own, self._pool.num_pages - num_pages)
        held = self._pool.owners()
        # One that holds nothing is on its way out, or has been preempted and waits for `wanted_pages`.
        return own + sum(
            self._growth_of(running, held[request]) for request, running in self._admitted.items() if request in held
        )

    def _growth_of(self, one: _Waiting, num_held: int) -> int:
        mean_tokens = max(1, round(self._mean_answer_tokens))
        num_means = max(1, -(-(num_held * self._pool.page_tokens + 1 - one.num_tokens) // mean_tokens))
        answer_tokens = min(one.max_answer_tokens, num_means * mean_tokens)
        return max(0, self._pool.num_pages_for(one.num_tokens + answer_tokens) - num_held)

    def _retry_after_s(self) -> float:
        """The mean time between recent ends: after about that long, one place in the line is free."""
        low, high = RETRY_AFTER_S
        if len(self._recent_ends_s) < 2:
            return low
        span_s = self._recent_ends_s[-1] - self._recent_ends_s[0]
        return min(max(span_s / (len(self._recent_ends_s) - 1), low), high)
