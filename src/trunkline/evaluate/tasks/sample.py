"""A sample of a task: one sequence of token ids, and where in it which answers stand."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# A model may set words and punctuation of its own around answers, which takes more tokens than they do here.
_SHARE_NEW_TOKENS, _MORE_NEW_TOKENS = 2, 16


@dataclass(frozen=True)
class Answer:
    """One thing to retrieve.

    Attributes:
        key: what it is asked by, or what it is the answer to.
        text: the answer, as a generated text has to contain it.
        start: position of its first token in the sample.
        stop: position behind its last token.
        depth: where in the haystack it was asked to stand, from 0 (the beginning) to 1 (the end); None for tasks whose
            answers stand everywhere.
        evidence: positions (first, behind the last) of the statement it is to be retrieved from; None as for depth.
    """

    key: str
    text: str
    start: int
    stop: int
    depth: float | None
    evidence: tuple[int, int] | None


@dataclass(frozen=True)
class Question:
    """A question behind the haystack, with its answers.

    Attributes:
        start: position of its first token in the sample.
        answers: in the order in which they stand; the question goes up to the first one's `start`.
    """

    start: int
    answers: tuple[Answer, ...]


@dataclass(frozen=True)
class Sample:
    """One haystack with all questions about it, each followed by its answers.

    Attributes:
        task: name of the task.
        index: number of the sample, from 0.
        ids: (S,) int64, exactly as long as asked.
        prefix_length: tokens in front of the first question; all questions share them.
        questions: in the order in which they stand, at least one.
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
        """The answers of all questions, in order."""
        return [answer for question in self.questions for answer in question.answers]

    @property
    def prefix(self) -> Tensor:
        """The haystack and what is around it, (1, prefix_length) int64: what one prefill goes through."""
        return self.ids[None, : self.prefix_length]

    @property
    def continuations(self) -> list[Tensor]:
        """Each question without its answers, (n,) int64: what follows the prefix before a model generates."""
        return [self.ids[question.start : question.answers[0].start] for question in self.questions]

    @property
    def max_new_tokens(self) -> int:
        """Twice the tokens that the longest answers take, and 16."""
        longest = max(question.answers[-1].stop - question.answers[0].start for question in self.questions)
        return _SHARE_NEW_TOKENS * longest + _MORE_NEW_TOKENS
