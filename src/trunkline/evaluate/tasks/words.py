"""Made-up names, numbers and variables for needles: as many as the longest context needs, none twice."""

from __future__ import annotations

from trunkline.evaluate.draws import Draws

_ONSETS: tuple[str, ...] = (*"bcdfghjklmnprstvwz", "br", "cl", "dr", "fl", "gr", "pl", "st", "tr")
_VOWELS = "aeiou"
_CODAS: tuple[str, ...] = ("", "", *"lmnrst")
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class Words:
    """Draws words that have not been drawn before.

    A name is of a few syllables, so that it can be said, means nothing, and cannot be guessed from the text around it.

    Args:
        draws: where the words come from.
    """

    def __init__(self, draws: Draws) -> None:
        self._draws = draws
        self._taken: set[str] = set()

    def name(self) -> str:
        """Return a name of 2 or 3 syllables, of millions of possible ones."""
        while True:
            word = "".join(self._syllable() for _ in range(2 + self._draws.below(2)))
            if self._take(word):
                return word

    def _syllable(self) -> str:
        return self._draws.choice(_ONSETS) + self._draws.choice(_VOWELS) + self._draws.choice(_CODAS)

    def number(self, num_digits: int) -> str:
        """Return a number of so many digits; the first is not 0."""
        while True:
            word = str(10 ** (num_digits - 1) + self._draws.below(9 * 10 ** (num_digits - 1)))
            if self._take(word):
                return word

    def variable(self) -> str:
        """Return a variable's name: five capital letters."""
        while True:
            word = "".join(self._draws.choice(_LETTERS) for _ in range(5))
            if self._take(word):
                return word

    def _take(self, word: str) -> bool:
        if word in self._taken:
            return False
        self._taken.add(word)
        return True
