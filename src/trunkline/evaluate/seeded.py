"""Random draws that depend on a key alone, and made-up words drawn with them.

Python and NumPy do not promise that `choice` and `shuffle` stay the same between versions. A task that changes with an
upgrade cannot be compared with earlier results, so the generator is SplitMix64 (Steele, Lea and Flood, OOPSLA 2014),
seeded with a hash of the key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = 2**64 - 1
_ONSETS: tuple[str, ...] = (*"bcdfghjklmnprstvwz", "br", "cl", "dr", "fl", "gr", "pl", "st", "tr")
_VOWELS = "aeiou"
_CODAS: tuple[str, ...] = ("", "", *"lmnrst")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class SplitMix64:
    """Pseudorandom generator seeded by a key.

    Args:
        key: purpose of the draws, such as seed, task, length and number of a sample. Different keys give independent
            streams.
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
        """Draw an integer from 0 to `count - 1`, uniformly to within count / 2^64."""
        return (self._next() * count) >> 64

    def choice(self, items: Sequence[T]) -> T:
        """Draw one of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: list[T]) -> None:
        """Shuffle the items in place (Fisher and Yates)."""
        for last in range(len(items) - 1, 0, -1):
            other = self.below(last + 1)
            items[last], items[other] = items[other], items[last]


class UniqueWords:
    """Source of made-up names, numbers and variables; none is returned twice.

    Args:
        draws: generator of the words.
    """

    def __init__(self, draws: SplitMix64) -> None:
        self._draws = draws
        self._used: set[str] = set()

    def name(self) -> str:
        """Return a pronounceable name of 2 or 3 syllables, out of millions."""
        return self._unused(lambda: "".join(self._syllable() for _ in range(2 + self._draws.below(2))))

    def number(self, num_digits: int) -> str:
        """Return a number of `num_digits` digits; the first is not 0."""
        least = 10 ** (num_digits - 1)
        return self._unused(lambda: str(least + self._draws.below(9 * least)))

    def variable(self) -> str:
        """Return the name of a variable: five capital letters."""
        return self._unused(lambda: "".join(self._draws.choice(_LETTERS) for _ in range(5)))

    def _syllable(self) -> str:
        return self._draws.choice(_ONSETS) + self._draws.choice(_VOWELS) + self._draws.choice(_CODAS)

    def _unused(self, draw: Callable[[], str]) -> str:
        for _ in range(100_000):
            if (word := draw()) not in self._used:
                self._used.add(word)
                return word
        raise ValueError(
            "a sample needs more different numbers or words than there are: use more digits or fewer depths."
        )
