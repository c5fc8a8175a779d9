"""Outcomes of answers: retrieved or not, teacher-forced or generated."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trunkline.evaluate.needle_samples import Answer, Sample
from trunkline.evaluate.scorers import TokenScores

Way = Literal["forced", "generated"]
WAYS: tuple[Way, ...] = ("forced", "generated")


@dataclass(frozen=True)
class Outcome:
    """Outcome of one answer.

    Attributes:
        way: `forced` (the answer was in the input, and each of its tokens was predicted) or `generated`.
        task: name of the task.
        length: tokens of the sample.
        sample: number of the sample.
        key: name or value that was asked for.
        expected: text of the answer.
        depth: depth of its statement, from 0 to 1.
        retrieved: all its tokens were the most likely ones, or the generated text contains it.
        log_prob: natural logarithm of the answer's probability, all tokens; None where generated.
        num_tokens: tokens of the answer.
        text: generated text; None where forced.
    """

    way: Way
    task: str
    length: int
    sample: int
    key: str
    expected: str
    depth: float
    retrieved: bool
    log_prob: float | None
    num_tokens: int
    text: str | None


def score_forced(samples: Sequence[Sample], scores: TokenScores) -> list[Outcome]:
    """Return an outcome for each teacher-forced answer.

    Args:
        samples: samples of one length, one a row.
        scores: scores of their tokens, (B, S).

    Raises:
        ValueError: the scores have another shape than the samples.
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
            outcomes.append(_outcome("forced", sample, answer, retrieved=retrieved, log_prob=log_prob, text=None))
    return outcomes


def score_generated(sample: Sample, texts: Sequence[str]) -> list[Outcome]:
    """Return an outcome for each answer of a sample, given one generated text for each of its questions."""
    return [
        _outcome("generated", sample, answer, retrieved=contains(text, answer.text), log_prob=None, text=text)
        for question, text in zip(sample.questions, texts, strict=True)
        for answer in question.answers
    ]


def _outcome(way: Way, sample: Sample, answer: Answer, **found: Any) -> Outcome:
    return Outcome(
        way=way, task=sample.task, length=sample.length, sample=sample.index, key=answer.key, expected=answer.text,
        depth=answer.depth, num_tokens=answer.stop - answer.start, **found,
    )  # fmt: skip


def contains(text: str, answer: str) -> bool:
    """Return whether a text contains an answer as a word of its own, case ignored; `123` is not in `1234`."""
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(answer)}(?![A-Za-z0-9])", text, re.IGNORECASE) is not None
