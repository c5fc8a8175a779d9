"""Samples of a task: one sequence of token ids of an exact length, with the positions of all answers.

    [bos] introduction | haystack with statements in it | end of the text | question answers. question answers. …

All parts but the haystack have a fixed length; the haystack fills the rest to the token. Only its first sentence is
cut, so statements, questions and answers are always whole.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from trunkline.evaluate.haystack import Haystack, fill_exactly
from trunkline.evaluate.piece_tokenizer import PieceTokenizer
from trunkline.evaluate.seeded import SplitMix64, UniqueWords

# A model may put words and punctuation of its own around answers.
_NEW_TOKENS_PER_ANSWER_TOKEN, _MORE_NEW_TOKENS = 2, 16


@dataclass(frozen=True)
class Statement:
    """Needle: the parts of its text, cut where a question may end or an answer begin, and its depth from 0 to 1."""

    parts: tuple[str, ...]
    depth: float


@dataclass(frozen=True)
class ExpectedAnswer:
    """Answer as text: the key it answers, the answer without a leading space, the index of its statement."""

    key: str
    text: str
    statement: int


@dataclass(frozen=True)
class QuestionText:
    """Question as text: its parts, and the answers that follow with commas between them."""

    parts: tuple[str, ...]
    answers: list[ExpectedAnswer]

    def pieces(self) -> Iterator[tuple[str, ExpectedAnswer | None]]:
        """Yield the pieces of the question and its answers in order; a piece that is an answer comes with it."""
        yield from ((part, None) for part in self.parts)
        for number, answer in enumerate(self.answers):
            if number:
                yield ",", None
            yield f" {answer.text}", answer
        yield ".", None


@dataclass(frozen=True)
class SampleText:
    """Sample as text.

    Attributes:
        intro: text in front of the haystack.
        statements: needles, in order of their depths.
        sentences: endless sentences of the haystack.
        outro: text behind the haystack.
        questions: questions with answers.
    """

    intro: str
    statements: list[Statement]
    sentences: Iterator[str]
    outro: str
    questions: list[QuestionText]


class LongContextTask(Protocol):
    """Kind of sample; the fields of a task are its settings."""

    @property
    def name(self) -> str:
        """Name in tables and files."""

    def write(self, words: UniqueWords, draws: SplitMix64, haystack: Haystack, depths: tuple[float, ...]) -> SampleText:
        """Write a sample.

        Args:
            words: source of names and numbers.
            draws: generator of every other choice, such as an order.
            haystack: text around the needles.
            depths: depths of the needles, ascending.

        Returns:
            The sample as text, with one statement at each depth.
        """


@dataclass(frozen=True)
class Answer:
    """Answer in a sample.

    Attributes:
        key: name or value that the answer belongs to.
        text: the answer without a leading space; a generated text has to contain it.
        start: position of its first token in the sample.
        stop: position after its last token.
        depth: depth of its statement in the haystack, from 0 (beginning) to 1 (end).
        evidence: positions (first, after the last) of its statement.
    """

    key: str
    text: str
    start: int
    stop: int
    depth: float
    evidence: tuple[int, int]


@dataclass(frozen=True)
class Question:
    """Question in a sample: position of its first token, and its answers in order; it ends where the first begins."""

    start: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Sample:
    """One haystack with all questions about it, each followed by its answers.

    Attributes:
        task: name of the task.
        index: number of the sample, from 0.
        ids: (S,) int64 token ids, exactly as many as requested.
        prefix_length: tokens before the first question; all questions share them.
        questions: questions in order, at least one.
    """

    task: str
    index: int
    ids: Tensor
    prefix_length: int
    questions: tuple[Question, ...]

    @property
    def length(self) -> int:
        """Tokens of the sequence."""
        return len(self.ids)

    @property
    def answers(self) -> list[Answer]:
        """Answers of all questions, in order."""
        return [answer for question in self.questions for answer in question.answers]

    @property
    def prefix(self) -> Tensor:
        """Ids before the first question, (1, prefix_length) int64: the input of one prefill."""
        return self.ids[None, : self.prefix_length]

    @property
    def continuations(self) -> list[Tensor]:
        """Questions without their answers, each (n,) int64: the prompts that follow the prefix."""
        return [self.ids[question.start : question.answers[0].start] for question in self.questions]

    @property
    def max_new_tokens(self) -> int:
        """Most tokens to generate for any question: twice those of the longest answers to one, plus 16."""
        longest = max(question.answers[-1].stop - question.answers[0].start for question in self.questions)
        return _NEW_TOKENS_PER_ANSWER_TOKEN * longest + _MORE_NEW_TOKENS


class SampleMaker:
    """Maker of samples; a sample depends on its arguments alone, not on the machine or on earlier samples.

    Args:
        pieces: the tokenizer.
        haystack: text around needles.
        depths: depths of the answers, each from 0 to 1; one needle each.
        seed: seed of the evaluation.
    """

    def __init__(self, pieces: PieceTokenizer, haystack: Haystack, depths: Sequence[float], seed: int) -> None:
        self._pieces, self._haystack, self._depths, self._seed = pieces, haystack, tuple(sorted(depths)), seed

    def least_length(self, task: LongContextTask, length: int, index: int) -> int:
        """Return the fewest tokens of a sample whose haystack has at least as much filler as needles.

        Args:
            task: the task.
            length: intended length. Samples of another length have other names, which may take a few tokens more.
            index: number of the sample.
        """
        text = self._write(task, length, index)
        needles = sum(len(self._pieces.encode(part)) for statement in text.statements for part in statement.parts)
        return self._num_fixed(text) + needles

    def make(self, task: LongContextTask, length: int, index: int) -> Sample:
        """Make a sample.

        Args:
            task: the task.
            length: tokens of the whole sequence, up to the full stop after the last answer.
            index: number of the sample; samples differ in needles and text.

        Raises:
            ValueError: the length is below `least_length`, or the tokenizer cannot write the task.
        """
        least = self.least_length(task, length, index)
        if length < least:
            raise ValueError(
                f"lengths: {length:,} tokens are too short for sample {index} of task '{task.name}', which takes at "
                f"least {least:,}. Set lengths to that or more, or ask for fewer depths."
            )
        text = self._write(task, length, index)
        sentences = fill_exactly(self._pieces, text.sentences, length - self._num_fixed(text))
        ids = [*self._pieces.bos, *self._pieces.encode(text.intro)]
        evidence, done = [], 0
        # Statements are in order of depth, so the borders ascend.
        borders = _nearest_borders(sentences, [statement.depth for statement in text.statements])
        for statement, border in zip(text.statements, borders, strict=True):
            ids.extend(token for sentence in sentences[done:border] for token in sentence)
            start, done = len(ids), border
            ids.extend(token for part in statement.parts for token in self._pieces.encode(part))
            evidence.append((start, len(ids)))
        ids.extend(token for sentence in sentences[done:] for token in sentence)
        ids.extend(self._pieces.encode(text.outro))
        prefix_length, questions = len(ids), []
        for question in text.questions:
            begin, answers = len(ids), []
            for part, expected in question.pieces():
                start = len(ids)
                ids.extend(self._pieces.encode(part))
                if expected is not None:
                    which = expected.statement
                    depth = text.statements[which].depth
                    answers.append(Answer(expected.key, expected.text, start, len(ids), depth, evidence[which]))
            questions.append(Question(begin, tuple(answers)))
        return Sample(task.name, index, torch.tensor(ids, dtype=torch.int64), prefix_length, tuple(questions))

    def _write(self, task: LongContextTask, length: int, index: int) -> SampleText:
        key = (self._seed, task.name, length, index)
        words, draws = UniqueWords(SplitMix64(*key, "words")), SplitMix64(*key, "haystack")
        text = task.write(words, draws, self._haystack, self._depths)
        # In the order of the text, each answer would be the next needle's number, whatever the question.
        SplitMix64(*key, "order").shuffle(text.questions)
        return text

    def _num_fixed(self, text: SampleText) -> int:
        parts = [text.intro, text.outro, *(part for statement in text.statements for part in statement.parts)]
        parts += [part for question in text.questions for part, _ in question.pieces()]
        return len(self._pieces.bos) + sum(len(self._pieces.encode(part)) for part in parts)


def _nearest_borders(sentences: Sequence[Sequence[int]], depths: Sequence[float]) -> list[int]:
    """Return for each depth the number of sentences before the border that is nearest to it, in tokens."""
    ends = [0, *accumulate(map(len, sentences))]
    borders = []
    for depth in depths:
        wanted = depth * ends[-1]
        border = bisect_left(ends, wanted)
        if border and wanted - ends[border - 1] <= ends[min(border, len(ends) - 1)] - wanted:
            border -= 1
        borders.append(border)
    return borders
