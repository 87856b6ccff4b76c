"""One sequence inside a replica: from admission to its last token, what is known and what is computed.

position   0 ........ num_cached ........ num_computed ........ goal .. num_tokens
           | KV shared from |  KV computed    |  to be computed    |
           | earlier ones   |  for this one   |                    |

num_cached <= num_computed <= goal <= num_tokens, and pages cover at least num_computed positions
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pdd.base.errors import InvariantBroken
from pdd.base.ids import PageId, RequestId, SequenceId
from pdd.lifecycle.request import SamplingParams


@dataclass(slots=True, kw_only=True, eq=False)
class Sequence:
    """Counts are in tokens. The scheduler alone changes it once it has been added."""

    id: SequenceId
    request: RequestId
    prompt: tuple[int, ...]
    sampling: SamplingParams | None
    """None on a prefill replica: the sequence ends with the KV of all but its last prompt token."""
    pages: list[PageId]
    num_cached: int
    num_computed: int
    """`num_cached` for a new sequence; `len(prompt) - 1` when a prefiller delivered the rest."""
    tokens: list[int] = field(init=False)
    """The prompt and what has been sampled."""
    num_pages_sent: int | None = field(init=False, default=None)
    """Pages that the executor knows of; None: it does not know the sequence."""
    last_step: int = field(init=False, default=-1)
    """Number of the step that last computed for it, or else of the one before its arrival."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        if not 0 <= self.num_cached <= self.num_computed <= self.goal:
            raise InvariantBroken(
                f"{self.request}: {self.num_cached} cached <= {self.num_computed} computed <= {self.goal} tokens "
                "does not hold"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.prompt)

    @property
    def output(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def goal(self) -> int:
        """Positions whose KV has to be computed, as far as tokens are known."""
        return len(self.tokens) - (self.sampling is None)

    @property
    def num_remaining(self) -> int:
        return self.goal - self.num_computed

    @property
    def decoding(self) -> bool:
        """Only the last known token has to be computed, and a token sampled from it."""
        return self.sampling is not None and self.num_remaining == 1

    def lose_pages(self) -> None:
        """Preempted: everything has to be computed again."""
        self.pages = []
        self.num_cached = self.num_computed = 0
        self.num_pages_sent = None

    def gain_pages(self, pages: list[PageId], num_cached: int) -> None:
        """Starts again after a preemption."""
        self.pages = pages
        self.num_cached = self.num_computed = num_cached
