"""A task's sample before it is tokens: what is said where, and what is asked. And how it is laid out.

    [bos] introduction | haystack with statements in it | end of the text | question answers. question answers. …

Everything but the haystack has its length; the haystack takes what is left, to the token: its first sentence loses its
beginning. Whatever fills it, tokens are only ever cut there, so statements, questions and answers are always whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch

from trunkline.evaluate.draws import Draws
from trunkline.evaluate.tasks.haystack import Haystack
from trunkline.evaluate.tasks.pieces import Pieces
from trunkline.evaluate.tasks.sample import Answer, Question, Sample
from trunkline.evaluate.tasks.words import Words


@dataclass(frozen=True)
class Statement:
    """A needle.

    Attributes:
        parts: its text, cut where a question about it may end or an answer begin.
        depth: where it is to stand, 0 to 1.
    """

    parts: tuple[str, ...]
    depth: float


@dataclass(frozen=True)
class Expected:
    """An answer.

    Attributes:
        key: what it is the answer to.
        text: of the answer, without a space in front.
        statement: number of the statement that says it; None where no single one does.
    """

    key: str
    text: str
    statement: int | None


@dataclass(frozen=True)
class Asked:
    """A question.

    Attributes:
        parts: its text, up to the answers.
        answers: they follow with a comma between them.
    """

    parts: tuple[str, ...]
    answers: tuple[Expected, ...]


@dataclass(frozen=True)
class Plan:
    """What a sample consists of.

    Attributes:
        intro: text in front of the haystack.
        statements: in the order of their depths.
        fill: makes the haystack: so many tokens, as sentences that statements may stand between.
        least_fill: fewest tokens that the haystack may have.
        outro: text behind the haystack.
        asked: the questions.
    """

    intro: str
    statements: tuple[Statement, ...]
    fill: Callable[[int], list[list[int]]]
    least_fill: int
    outro: str
    asked: tuple[Asked, ...]


@dataclass(frozen=True)
class Materials:
    """What a task makes a plan from.

    Attributes:
        pieces: the tokenizer.
        words: names and numbers for this sample.
        draws: decides all that the words do not, such as orders.
        haystack: where text around needles comes from.
        depths: of the answers, ascending.
    """

    pieces: Pieces
    words: Words
    draws: Draws
    haystack: Haystack
    depths: tuple[float, ...]

    def tokens_of(self, statements: Sequence[Statement]) -> int:
        """Return how many tokens some statements take."""
        return sum(len(self.pieces.encode(part)) for statement in statements for part in statement.parts)


class Task(Protocol):
    """A kind of sample. Its fields are its settings."""

    @property
    def name(self) -> str:
        """What tables and files call it."""

    def plan(self, materials: Materials) -> Plan:
        """Decide what a sample consists of."""


def make_sample(
    task: Task, pieces: Pieces, haystack: Haystack, *, length: int, index: int, depths: Sequence[float], seed: int
) -> Sample:
    """Make one sample of a task: the same on every machine, whatever was made before.

    Args:
        task: what to make.
        pieces: the tokenizer.
        haystack: where text around needles comes from; tasks that fill theirs themselves leave it aside.
        length: tokens of the whole sequence, from the first to the end of the last answer.
        index: number of the sample; others have other needles and texts.
        depths: where answers are to stand, each from 0 to 1; one needle each.
        seed: of the whole evaluation.

    Returns:
        The sample, exactly `length` tokens long.

    Raises:
        ValueError: the length is too short for this task, or the tokenizer cannot write it.
    """
    encoded = _prepare(task, pieces, haystack, length, index, depths, seed)
    if length < encoded.least_length:
        raise ValueError(
            f"lengths: {length:,} tokens are too short for sample {index} of task '{task.name}', which takes at least "
            f"{encoded.least_length:,}. Set lengths to that or more, or ask for fewer depths."
        )
    return _lay_out(encoded, task.name, index, length)


def least_length(
    task: Task, pieces: Pieces, haystack: Haystack, *, length: int, index: int, depths: Sequence[float], seed: int
) -> int:
    """Return how many tokens a sample takes at least: half of its haystack has to be hay.

    Args:
        task: as in `make_sample`, like all others; a sample of another length has other needles, and their names may
            take a few tokens more or less.
        pieces: the tokenizer.
        haystack: where text comes from.
        length: of the sample.
        index: number of the sample.
        depths: of the answers.
        seed: of the whole evaluation.

    Returns:
        Tokens.
    """
    return _prepare(task, pieces, haystack, length, index, depths, seed).least_length


@dataclass(frozen=True)
class _Encoded:
    """A plan whose fixed parts are tokens; `asked` says where in `tail` a question begins and its answers stand."""

    plan: Plan
    front: list[int]
    statements: list[list[int]]
    back: list[int]
    tail: list[int]
    asked: list[tuple[int, list[tuple[Expected, int, int]]]]

    @property
    def num_fixed(self) -> int:
        return sum(map(len, (self.front, *self.statements, self.back, self.tail)))

    @property
    def least_length(self) -> int:
        return self.num_fixed + self.plan.least_fill


def _prepare(
    task: Task, pieces: Pieces, haystack: Haystack, length: int, index: int, depths: Sequence[float], seed: int
) -> _Encoded:
    key = (seed, task.name, length, index)
    words, draws = Words(Draws(*key, "words")), Draws(*key, "haystack")
    plan = task.plan(Materials(pieces, words, draws, haystack, tuple(sorted(depths))))
    # In the order of the text, each answer would be the next needle's number, whatever the question.
    asked = list(plan.asked)
    Draws(*key, "order").shuffle(asked)
    tail, found = _lay_out_questions(asked, pieces)
    front = [*pieces.bos, *pieces.encode(plan.intro)]
    statements = [_encode(pieces, statement.parts) for statement in plan.statements]
    return _Encoded(plan, front, statements, pieces.encode(plan.outro), tail, found)


def _lay_out(encoded: _Encoded, name: str, index: int, length: int) -> Sample:
    plan = encoded.plan
    sentences = plan.fill(length - encoded.num_fixed)
    boundaries = _boundaries(sentences, [statement.depth for statement in plan.statements])
    ids, places, done = list(encoded.front), [], 0
    # Statements are in the order of their depths, so boundaries only ever go on.
    for statement, boundary in zip(encoded.statements, boundaries, strict=True):
        ids.extend(token for sentence in sentences[done:boundary] for token in sentence)
        places.append((len(ids), len(ids) + len(statement)))
        ids.extend(statement)
        done = boundary
    ids.extend(token for sentence in sentences[done:] for token in sentence)
    ids.extend(encoded.back)
    prefix = len(ids)
    ids.extend(encoded.tail)

    def answer(expected: Expected, start: int, stop: int) -> Answer:
        which = expected.statement
        depth, place = (None, None) if which is None else (plan.statements[which].depth, places[which])
        return Answer(expected.key, expected.text, prefix + start, prefix + stop, depth, place)

    questions = tuple(
        Question(prefix + start, tuple(answer(*found) for found in answers)) for start, answers in encoded.asked
    )
    return Sample(name, index, torch.tensor(ids, dtype=torch.int64), prefix, questions)


def _encode(pieces: Pieces, parts: Sequence[str]) -> list[int]:
    return [token for part in parts for token in pieces.encode(part)]


def _lay_out_questions(
    questions: Sequence[Asked], pieces: Pieces
) -> tuple[list[int], list[tuple[int, list[tuple[Expected, int, int]]]]]:
    """Return the ids behind the haystack and, from their first one on, where questions and answers stand in them."""
    ids: list[int] = []
    found = []
    for asked in questions:
        start, answers = len(ids), []
        ids.extend(_encode(pieces, asked.parts))
        for number, expected in enumerate(asked.answers):
            if number:
                ids.extend(pieces.encode(","))
            first = len(ids)
            ids.extend(pieces.encode(f" {expected.text}"))
            answers.append((expected, first, len(ids)))
        ids.extend(pieces.encode("."))
        found.append((start, answers))
    return ids, found


def _boundaries(sentences: Sequence[Sequence[int]], depths: Sequence[float]) -> list[int]:
    """Return for each depth in front of which sentence it lies nearest to it."""
    ends = [0, *accumulate(map(len, sentences))]
    found = []
    for depth in depths:
        wanted = depth * ends[-1]
        place = bisect_left(ends, wanted)
        if place and wanted - ends[place - 1] <= ends[min(place, len(ends) - 1)] - wanted:
            place -= 1
        found.append(place)
    return found
