"""Needle tasks: numbers that belong to names, said at given depths and asked for at the end.

The names are made up, the numbers drawn, so nothing but the text can tell them. In the style of RULER (Hsieh et al.,
COLM 2024, section 3.1) and of the pass key of Mohtashami and Jaggi (2023), with texts of our own. Other than there, a
haystack holds a needle at every depth and every one is asked for, so that one forward tells all depths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from trunkline.evaluate.tasks.filling import fill_with
from trunkline.evaluate.tasks.haystack import Haystack, Repeated
from trunkline.evaluate.tasks.plan import Asked, Expected, Materials, Plan, Statement
from trunkline.evaluate.tasks.words import Words

_OUTRO = " This is the end of the text."


def _sentence(name: str, number: str) -> tuple[str, ...]:
    return (" The number of", f" {name}", " is", f" {number}", ".")


def _fill_text(materials: Materials, haystack: Haystack, num_tokens: int) -> list[list[int]]:
    return fill_with(materials.pieces, haystack.sentences(materials.draws), num_tokens)


def groups_of(count: int, size: int) -> list[list[int]]:
    """Deal `count` things out to as few groups of at most `size` as hold them, one to each in turn.

    Args:
        count: of things, which are numbered from 0.
        size: most things of a group.

    Returns:
        The numbers in each group: those of one group are spread over all.
    """
    num_groups = -(-count // size)
    return [list(range(first, count, num_groups)) for first in range(num_groups)]


@dataclass(frozen=True)
class Needle:
    """One name and its number at each depth, in prose: each asked for on its own."""

    num_digits: int = 7
    name: str = "needle"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        facts = [(materials.words.name(), materials.words.number(self.num_digits)) for _ in materials.depths]
        statements = tuple(
            Statement(_sentence(*fact), depth) for fact, depth in zip(facts, materials.depths, strict=True)
        )
        asked = tuple(Asked(_sentence(*fact)[:3], (Expected(*fact, number),)) for number, fact in enumerate(facts))
        return Plan(
            " The following text tells the numbers of some names. They are asked for at its end.",
            statements,
            partial(_fill_text, materials, materials.haystack),
            materials.tokens_of(statements),
            _OUTRO,
            asked,
        )


@dataclass(frozen=True)
class MultiKey:
    """As `Needle`, in a haystack of nothing but such names and numbers (RULER's multi-key at its hardest)."""

    num_digits: int = 7
    name: str = "multikey"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        plan = Needle(self.num_digits).plan(materials)

        def fill(num_tokens: int) -> list[list[int]]:
            return fill_with(materials.pieces, _facts(materials.words, self.num_digits), num_tokens)

        return Plan(
            " The following list tells the numbers of many names. Some are asked for at its end.",
            plan.statements,
            fill,
            plan.least_fill,
            " This is the end of the list.",
            plan.asked,
        )


def _facts(words: Words, num_digits: int) -> Iterator[str]:
    while True:
        yield "".join(_sentence(words.name(), words.number(num_digits)))


@dataclass(frozen=True)
class MultiQuery:
    """As `Needle`, with up to `group` names in one question, answered in its order."""

    group: int = 4
    num_digits: int = 7
    name: str = "multiquery"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        plan = Needle(self.num_digits).plan(materials)
        single = [asked.answers[0] for asked in plan.asked]
        asked = []
        for numbers in groups_of(len(single), self.group):
            materials.draws.shuffle(numbers)
            names = [part for number in numbers for part in (",", f" {single[number].key}")][1:]
            parts = (" The numbers of", *names, ",", " in this order", ",", " are")
            asked.append(Asked(parts, tuple(single[number] for number in numbers)))
        return Plan(plan.intro, plan.statements, plan.fill, plan.least_fill, plan.outro, tuple(asked))


@dataclass(frozen=True)
class MultiValue:
    """Names with up to `group` numbers each, far from each other; all of a name's are asked for at once."""

    group: int = 4
    num_digits: int = 7
    name: str = "multivalue"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        words = materials.words
        names = [""] * len(materials.depths)
        values = [words.number(self.num_digits) for _ in materials.depths]
        asked = []
        for numbers in groups_of(len(names), self.group):
            name = words.name()
            for number in numbers:
                names[number] = name
            parts = (" The numbers of", f" {name}", ",", " in the order of the text", ",", " are")
            asked.append(Asked(parts, tuple(Expected(name, values[number], number) for number in numbers)))
        statements = tuple(
            Statement((" One of the numbers of", f" {name}", " is", f" {value}", "."), depth)
            for name, value, depth in zip(names, values, materials.depths, strict=True)
        )
        return Plan(
            " The following text tells several numbers of each of some names. They are asked for at its end.",
            statements,
            partial(_fill_text, materials, materials.haystack),
            materials.tokens_of(statements),
            _OUTRO,
            tuple(asked),
        )


@dataclass(frozen=True)
class Passkey:
    """Pass keys of five digits, each said twice, in a text that repeats itself."""

    num_digits: int = 5
    name: str = "passkey"

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""
        words = materials.words
        facts = [(words.name(), words.number(self.num_digits)) for _ in materials.depths]
        statements, asked = [], []
        for number, ((gate, key), depth) in enumerate(zip(facts, materials.depths, strict=True)):
            question = (" The pass key for gate", f" {gate}", " is")
            again = (" Keep it in mind", ":", f" {key}", " opens gate", f" {gate}", ".")
            statements.append(Statement((*question, f" {key}", ".", *again), depth))
            asked.append(Asked(question, (Expected(gate, key, number),)))
        return Plan(
            " Pass keys for gates are hidden in a long and dull text. They are asked for at its end.",
            tuple(statements),
            partial(_fill_text, materials, Repeated()),
            materials.tokens_of(statements),
            _OUTRO,
            tuple(asked),
        )
