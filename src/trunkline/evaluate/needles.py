"""Needle tasks: made-up facts at every depth of a haystack, all asked for at the end.

Names and numbers are random, so that only the text can tell them. In the style of RULER (Hsieh et al., COLM 2024,
sections 3.1 and 3.2) and of the pass key of Mohtashami and Jaggi (2023), with texts of our own. Unlike theirs, a
haystack holds a needle at every depth and every one is asked for, so that one forward scores all depths.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trunkline.evaluate.haystack import Haystack, repeated_sentences
from trunkline.evaluate.needle_samples import ExpectedAnswer, LongContextTask, QuestionText, SampleText, Statement
from trunkline.evaluate.seeded import SplitMix64, UniqueWords

_END_OF_TEXT = " This is the end of the text."
_IN_ORDER_OF_TEXT = (",", " in the order of the text", ",", " are")


def _fact(name: str, number: str) -> tuple[str, ...]:
    return (" The number of", f" {name}", " is", f" {number}", ".")


def _other_facts(words: UniqueWords, num_digits: int) -> Iterator[str]:
    while True:
        yield "".join(_fact(words.name(), words.number(num_digits)))


def spread_over_groups(count: int, size: int) -> list[list[int]]:
    """Deal the numbers 0 to `count - 1` in turn to as few groups of at most `size` as hold them."""
    num_groups = -(-count // size)
    return [list(range(first, count, num_groups)) for first in range(num_groups)]


@dataclass(frozen=True)
class NeedleTask:
    """Numbers of names, one at each depth.

    Attributes:
        name: name in tables and files; it is part of the seed.
        num_digits: digits of a number.
        names_per_question: most names in one question (RULER's multi-query).
        numbers_per_name: most numbers of a name, far from each other and asked for at once (RULER's multi-value).
        only_facts: fill the haystack with further names and numbers (RULER's multi-key at its hardest).

    Raises:
        ValueError: both `names_per_question` and `numbers_per_name` are above 1.
    """

    name: str = "needle"
    num_digits: int = 7
    names_per_question: int = 1
    numbers_per_name: int = 1
    only_facts: bool = False

    def __post_init__(self) -> None:
        if self.names_per_question > 1 and self.numbers_per_name > 1:
            raise ValueError("names_per_question and numbers_per_name: set only one of them above 1.")

    def write(self, words: UniqueWords, draws: SplitMix64, haystack: Haystack, depths: tuple[float, ...]) -> SampleText:
        """Write a sample: facts at the given depths, their questions, and the text around them."""
        several = self.numbers_per_name > 1
        statements, questions = (self._multi_value if several else self._one_value)(words, draws, depths)
        # Further facts must come from `words`, too, so that no name has two numbers.
        sentences = _other_facts(words, self.num_digits) if self.only_facts else haystack(draws)
        intro = " The following text tells the numbers of some names. They are asked for at its end."
        if self.only_facts:
            intro = " The following list tells the numbers of many names. Some are asked for at its end."
        elif several:
            intro = " The following text tells several numbers of each of some names. They are asked for at its end."
        outro = " This is the end of the list." if self.only_facts else _END_OF_TEXT
        return SampleText(intro, statements, sentences, outro, questions)

    def _one_value(
        self, words: UniqueWords, draws: SplitMix64, depths: tuple[float, ...]
    ) -> tuple[list[Statement], list[QuestionText]]:
        facts = [(words.name(), words.number(self.num_digits)) for _ in depths]
        statements = [Statement(_fact(*fact), depth) for fact, depth in zip(facts, depths, strict=True)]
        answers = [ExpectedAnswer(*fact, number) for number, fact in enumerate(facts)]
        if self.names_per_question == 1:
            return statements, [QuestionText(_fact(*fact)[:3], [answers[n]]) for n, fact in enumerate(facts)]
        questions = []
        for numbers in spread_over_groups(len(facts), self.names_per_question):
            draws.shuffle(numbers)
            names = [part for number in numbers for part in (",", f" {facts[number][0]}")][1:]
            parts = (" The numbers of", *names, ",", " in this order", ",", " are")
            questions.append(QuestionText(parts, [answers[number] for number in numbers]))
        return statements, questions

    def _multi_value(
        self, words: UniqueWords, draws: SplitMix64, depths: tuple[float, ...]
    ) -> tuple[list[Statement], list[QuestionText]]:
        values = [words.number(self.num_digits) for _ in depths]
        names, questions = [""] * len(depths), []
        for numbers in spread_over_groups(len(depths), self.numbers_per_name):
            name = words.name()
            for number in numbers:
                names[number] = name
            answers = [ExpectedAnswer(name, values[number], number) for number in numbers]
            questions.append(QuestionText((" The numbers of", f" {name}", *_IN_ORDER_OF_TEXT), answers))
        statements = [
            Statement((" One of the numbers of", f" {name}", " is", f" {value}", "."), depth)
            for name, value, depth in zip(names, values, depths, strict=True)
        ]
        return statements, questions


@dataclass(frozen=True)
class PasskeyTask:
    """Pass keys, one at each depth and said twice, in four sentences that repeat; no other haystack is used.

    Attributes:
        name: name in tables and files; it is part of the seed.
        num_digits: digits of a key.
    """

    name: str = "passkey"
    num_digits: int = 5

    def write(self, words: UniqueWords, draws: SplitMix64, haystack: Haystack, depths: tuple[float, ...]) -> SampleText:
        """Write a sample; `haystack` is not used."""
        statements, questions = [], []
        facts = [(words.name(), words.number(self.num_digits)) for _ in depths]
        for number, ((gate, key), depth) in enumerate(zip(facts, depths, strict=True)):
            question = (" The pass key for gate", f" {gate}", " is")
            again = (" Keep it in mind", ":", f" {key}", " opens gate", f" {gate}", ".")
            statements.append(Statement((*question, f" {key}", ".", *again), depth))
            questions.append(QuestionText(question, [ExpectedAnswer(gate, key, number)]))
        intro = " Pass keys for gates are hidden in a long and dull text. They are asked for at its end."
        return SampleText(intro, statements, repeated_sentences(draws), _END_OF_TEXT, questions)


@dataclass(frozen=True)
class VariableTask:
    """Chains of variable assignments, one assignment at each depth; each chain is asked for by its value.

    Attributes:
        name: name in tables and files; it is part of the seed.
        hops: most assignments of a chain after its first. Further depths go to further chains.
    """

    name: str = "variables"
    hops: int = 4

    def write(self, words: UniqueWords, draws: SplitMix64, haystack: Haystack, depths: tuple[float, ...]) -> SampleText:
        """Write a sample.

        Raises:
            ValueError: there are fewer than two depths.
        """
        if len(depths) < 2:
            raise ValueError(
                f"depths: task '{self.name}' needs 2 at least, a variable and one that is assigned from it, and there "
                f"is {len(depths)}. Set more depths, or leave the task out."
            )
        parts: list[tuple[str, ...]] = [()] * len(depths)
        questions = []
        for numbers in spread_over_groups(len(depths), self.hops + 1):
            value, previous, answers = words.number(5), "", []
            for number in numbers:
                variable = words.variable()
                source = (" VAR", f" {previous}") if previous else (f" {value}",)
                parts[number] = (" VAR", f" {variable}", " =", *source, ".")
                answers.append(ExpectedAnswer(value, variable, number))
                previous = variable
            question = (" The variables whose value is", f" {value}", *_IN_ORDER_OF_TEXT)
            questions.append(QuestionText(question, answers))
        statements = [Statement(part, depth) for part, depth in zip(parts, depths, strict=True)]
        intro = (
            " The following text assigns values to variables, and variables to others. They are asked for at its end."
        )
        return SampleText(intro, statements, haystack(draws), _END_OF_TEXT, questions)


TASKS: dict[str, LongContextTask] = {
    task.name: task
    for task in (
        NeedleTask(),
        PasskeyTask(),
        NeedleTask("multikey", only_facts=True),
        NeedleTask("multiquery", names_per_question=4),
        NeedleTask("multivalue", numbers_per_name=4),
        VariableTask(),
    )
}
