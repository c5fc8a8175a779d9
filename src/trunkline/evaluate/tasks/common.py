"""Common words: a list of words as long as the context, and which come most often (in the style of RULER, section 3.3).

The words are asked for in alphabetical order: a set has many orders, and a teacher-forced answer needs one that follows
from the question.
"""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.evaluate.tasks.filling import cut_front
from trunkline.evaluate.tasks.plan import Asked, Expected, Materials, Plan

# No made-up word takes more with any tokenizer: it has twelve letters at most.
_MOST_TOKENS = 16


@dataclass(frozen=True)
class CommonWords:
    """Some words often, all others seldom, in an order drawn at random: no depth, since they are everywhere.

    Attributes:
        num_common: words to find.
        frequency: how often each of them stands in the list.
        rare: how often each other word does, the last ones perhaps less.
        name: what tables and files call it.
    """

    num_common: int = 10
    frequency: int = 30
    rare: int = 3
    name: str = "common-words"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        common = sorted(materials.words.name() for _ in range(self.num_common))
        often = [materials.pieces.encode(f" {word}") for word in common] * self.frequency

        def fill(num_tokens: int) -> list[list[int]]:
            items, total = list(often), sum(map(len, often))
            while total < num_tokens:
                # Few enough that all of them are needed: of words that are drawn and left out, others would depend.
                count = 1 + (num_tokens - total) // (self.rare * _MOST_TOKENS)
                for word in materials.pieces.encode_many([f" {materials.words.name()}" for _ in range(count)]):
                    copies = min(self.rare, max(0, -(-(num_tokens - total) // len(word))))
                    items.extend([word] * copies)
                    total += copies * len(word)
            materials.draws.shuffle(items)
            return cut_front(items, total - num_tokens)

        return Plan(
            " The following list repeats some words more often than others. They are asked for at its end.",
            (),
            fill,
            # As many tokens of rare words as of common ones, so that being common is a difference.
            2 * sum(map(len, often)),
            ". This is the end of the list.",
            (
                Asked(
                    (f" In alphabetical order, the {self.num_common} words that came most often are",),
                    tuple(Expected("most often", word, None) for word in common),
                ),
            ),
        )
