"""What counts as retrieved: teacher-forced, all tokens of the answer greedy; generated, the answer in the text."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trunkline.evaluate.models import TokenScores
from trunkline.evaluate.tasks import Answer, Sample

Way = Literal["forced", "generated"]
WAYS: tuple[Way, ...] = ("forced", "generated")


@dataclass(frozen=True)
class Outcome:
    """What became of one answer.

    Attributes:
        way: `forced` (the answer was given, and each token of it predicted) or `generated`.
        task: name of the task.
        length: tokens of the sample.
        sample: number of the sample.
        key: what was asked for.
        expected: text of the answer.
        depth: where it stood, 0 to 1; None where the task has no depth.
        retrieved: whether it counts.
        log_prob: natural logarithm of the answer's probability, all tokens; None where generated.
        num_tokens: tokens of the answer.
        text: what was generated; None where forced.
    """

    way: Way
    task: str
    length: int
    sample: int
    key: str
    expected: str
    depth: float | None
    retrieved: bool
    log_prob: float | None
    num_tokens: int
    text: str | None


def score_forced(samples: Sequence[Sample], scores: TokenScores) -> list[Outcome]:
    """Score answers that were given to the model.

    Args:
        samples: one a row.
        scores: of their tokens, (B, S).

    Returns:
        An outcome for each answer.

    Raises:
        ValueError: the scores are of another shape than the samples.
    """
    shape = (len(samples), samples[0].length)
    if tuple(scores.log_probs.shape) != shape or tuple(scores.is_greedy.shape) != shape:
        raise ValueError(
            f"scorer: it gave log_probs of shape {tuple(scores.log_probs.shape)} and is_greedy of shape "
            f"{tuple(scores.is_greedy.shape)} for ids of shape {shape}. Return one score a token, the first's too."
        )
    is_greedy, log_probs = scores.is_greedy.cpu(), scores.log_probs.cpu().double()
    outcomes = []
    for row, sample in enumerate(samples):
        for answer in sample.answers:
            place = slice(answer.start, answer.stop)
            retrieved, log_prob = bool(is_greedy[row, place].all()), float(log_probs[row, place].sum())
            outcomes.append(_outcome("forced", sample, answer, retrieved=retrieved, log_prob=log_prob))
    return outcomes


def score_generated(sample: Sample, texts: Sequence[str]) -> list[Outcome]:
    """Score answers that the model generated.

    Args:
        sample: what was asked.
        texts: what came for each of its questions.

    Returns:
        An outcome for each answer.
    """
    return [
        _outcome("generated", sample, answer, retrieved=contains(text, answer.text), text=text)
        for question, text in zip(sample.questions, texts, strict=True)
        for answer in question.answers
    ]


def _outcome(
    way: Way, sample: Sample, answer: Answer, *, retrieved: bool, log_prob: float | None = None, text: str | None = None
) -> Outcome:
    return Outcome(
        way=way, task=sample.task, length=sample.length, sample=sample.index, key=answer.key, expected=answer.text,
        depth=answer.depth, retrieved=retrieved, log_prob=log_prob, num_tokens=answer.stop - answer.start, text=text,
    )  # fmt: skip


def contains(text: str, answer: str) -> bool:
    """Say whether a text has the answer in it, as a word or number of its own, in capitals or not.

    Args:
        text: what was generated.
        answer: letters or digits.

    Returns:
        Whether it is there; `123` is not in `1234`.
    """
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(answer)}(?![A-Za-z0-9])", text, re.IGNORECASE) is not None
