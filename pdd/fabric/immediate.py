"""The 32 bits that ride with every write, and who owns which of them.

     31            20 19               7 6            0
    |  slot (12 bits) | generation (13)  | weight - 1  |

slot and generation name one handoff at its target; a slot's next owner has another generation, so a late write is
recognised as a stray. `weight` is the number of pieces that one write carries (1 to 128): adjacent pages and several
pages in one message may be joined freely, by rules that the target need not know, and the count stays exact.
"""

from __future__ import annotations

from collections import deque

from pdd.base.errors import QueueFull
from pdd.base.ids import Immediate

WEIGHT_BITS = 7
GENERATION_BITS = 13
SLOT_BITS = 12
NUM_SLOTS = 1 << SLOT_BITS
NUM_GENERATIONS = 1 << GENERATION_BITS
MAX_WEIGHT = 1 << WEIGHT_BITS


def pack(slot: int, generation: int) -> Immediate:
    """The immediate of a handoff, weight bits zero."""
    return Immediate(slot << (GENERATION_BITS + WEIGHT_BITS) | generation << WEIGHT_BITS)


def slot_of(immediate: Immediate) -> int:
    return immediate >> (GENERATION_BITS + WEIGHT_BITS)


def generation_of(immediate: Immediate) -> int:
    return immediate >> WEIGHT_BITS & (NUM_GENERATIONS - 1)


class ImmediateSlots:
    """Gives out immediates. A slot returns to the end of the line, so that its generation wraps as late as can be:
    after NUM_SLOTS * NUM_GENERATIONS (33 million) handoffs."""

    def __init__(self) -> None:
        self._free = deque(range(NUM_SLOTS))
        self._generation = [0] * NUM_SLOTS

    def take(self) -> Immediate:
        """Raises QueueFull when every slot is in use."""
        if not self._free:
            raise QueueFull(f"all {NUM_SLOTS} handoff slots of this replica are in use", retry_after_s=1.0)
        slot = self._free.popleft()
        return pack(slot, self._generation[slot])

    def give_back(self, immediate: Immediate) -> None:
        slot = slot_of(immediate)
        self._generation[slot] = (self._generation[slot] + 1) % NUM_GENERATIONS
        self._free.append(slot)

    @property
    def num_free(self) -> int:
        return len(self._free)
