"""Random draws that are the same on every machine, with every version of every library, in any order of asking.

Neither Python's nor NumPy's generators promise that `choice` and `shuffle` stay what they are, and a task that changes
with an upgrade cannot be compared with what was measured before. The generator is SplitMix64 (Steele, Lea and Flood,
OOPSLA 2014), begun at a hash of what the draws are for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = 2**64 - 1


class Draws:
    """A stream of draws that depends on its key alone.

    Args:
        key: what the draws are for, such as seed, name of the task, length, number of the sample. Other keys give
            streams that have nothing to do with this one.
    """

    def __init__(self, *key: int | str) -> None:
        self._state = int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little")

    def _next(self) -> int:
        self._state = (self._state + 0x9E3779B97F4A7C15) & _MASK
        mixed = self._state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
        return mixed ^ (mixed >> 31)

    def below(self, count: int) -> int:
        """Draw an integer from 0 to `count - 1`, each as likely as any other to within count / 2^64."""
        return (self._next() * count) >> 64

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: list[T]) -> None:
        """Bring the items into an order drawn from all orders (Fisher and Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]
