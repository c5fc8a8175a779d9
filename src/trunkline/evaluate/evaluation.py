"""Result of an evaluation: outcomes, and the scores that follow from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from pydantic_core import to_json

from trunkline.evaluate.evaluation_settings import EvaluateSettings
from trunkline.evaluate.outcomes import WAYS, Outcome, Way
from trunkline.evaluate.perplexity import DocumentLoss, MeanLoss, PositionLoss

K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class ScoreCell:
    """Score of a task at one length and depth.

    Attributes:
        way: `forced` or `generated`.
        task: name of the task.
        length: tokens of the samples.
        depth: depth of the answers.
        score: share of answers that were retrieved.
        num_answers: number of answers.
        loss: mean negative log likelihood of the answers' tokens, in nats a token; None where generated.
    """

    way: Way
    task: str
    length: int
    depth: float
    score: float
    num_answers: int
    loss: float | None


@dataclass(frozen=True)
class Evaluation:
    """Outcomes and scores of an evaluation.

    Attributes:
        settings: settings of the evaluation.
        outcomes: one outcome for each answer and way.
        by_position: perplexity by position; empty without documents.
        by_document: perplexity by document; empty without documents.
    """

    settings: EvaluateSettings
    outcomes: tuple[Outcome, ...]
    by_position: tuple[PositionLoss, ...] = ()
    by_document: tuple[DocumentLoss, ...] = ()

    @property
    def mean_loss(self) -> MeanLoss | None:
        """Mean over all tokens of all documents; None where no token was predicted."""
        predicted = [loss for loss in self.by_document if loss.num_tokens]
        num_tokens = sum(loss.num_tokens for loss in predicted)
        total = math.fsum(loss.num_tokens * loss.loss for loss in predicted)
        return MeanLoss(num_tokens, total / num_tokens) if num_tokens else None

    @property
    def ways(self) -> list[Way]:
        """Ways in which answers were scored."""
        return [way for way in WAYS if any(outcome.way == way for outcome in self.outcomes)]

    def cells(self) -> list[ScoreCell]:
        """Return the scores by way, task, length and depth, in this order."""
        groups = _grouped(self.outcomes, lambda o: (o.way, o.task, o.length, o.depth))
        order = list(_grouped(self.outcomes, lambda o: (o.way, o.task)))
        cells = []
        for (way, task, length, depth), answers in sorted(
            groups.items(), key=lambda item: (order.index(item[0][:2]), *item[0][2:])
        ):
            log_probs = [o.log_prob for o in answers if o.log_prob is not None]
            loss = -sum(log_probs) / sum(o.num_tokens for o in answers) if log_probs else None
            cells.append(ScoreCell(way, task, length, depth, _score(answers), len(answers), loss))
        return cells

    def task_scores(self, way: Way) -> dict[str, dict[int, float]]:
        """Return the share of answers retrieved by task and length, over all depths and samples."""
        scores: dict[str, dict[int, float]] = {}
        outcomes = [outcome for outcome in self.outcomes if outcome.way == way]
        for (task, length), answers in _grouped(outcomes, lambda o: (o.task, o.length)).items():
            scores.setdefault(task, {})[length] = _score(answers)
        return scores

    def length_scores(self, way: Way) -> dict[int, float]:
        """Return the mean score of the tasks at each length; every task has the same weight."""
        by_task = self.task_scores(way).values()
        lengths = sorted({length for scores in by_task for length in scores})
        return {length: math.fsum(scores[length] for scores in by_task) / len(by_task) for length in lengths}

    def effective_length(self, way: Way, task: str | None = None) -> int | None:
        """Return the longest length up to which the score of every length is at least the threshold.

        Args:
            way: `forced` or `generated`.
            task: name of a task; None for the mean over all tasks.

        Returns:
            Tokens; None where the shortest length is below the threshold, or nothing was scored in that way.
        """
        scores = self.length_scores(way) if task is None else self.task_scores(way).get(task, {})
        return effective_length(scores, self.settings.threshold)

    def to_json(self) -> str:
        """Return settings, scores, perplexities and every answer as JSON; NaN and infinity become null."""
        tasks = [{"kind": type(task).__name__, **vars(task)} for task in self.settings.resolved_tasks]
        content = {
            "settings": {**vars(self.settings), "tasks": tasks},
            "effective_length": {
                way: {
                    "mean": self.effective_length(way),
                    "tasks": {task: self.effective_length(way, task) for task in self.task_scores(way)},
                }
                for way in self.ways
            },
            "length_scores": {way: self.length_scores(way) for way in self.ways},
            "task_scores": {way: self.task_scores(way) for way in self.ways},
            "cells": self.cells(),
            "perplexity": {
                "mean": None if self.mean_loss is None else with_perplexity(self.mean_loss),
                "by_position": [with_perplexity(loss) for loss in self.by_position],
                "by_document": [with_perplexity(loss) for loss in self.by_document],
            },
            "answers": self.outcomes,
        }
        return to_json(content, indent=1, inf_nan_mode="null").decode() + "\n"


def effective_length(scores: dict[int, float], threshold: float) -> int | None:
    """Return the longest length up to which the score of every length is at least the threshold.

    Args:
        scores: scores by length in tokens.
        threshold: least score.

    Returns:
        Tokens; None where the shortest length is below the threshold.
    """
    effective = None
    for length, score in sorted(scores.items()):
        # A mean over tasks may round to just below a threshold that it equals.
        if score < threshold - 1e-9:
            break
        effective = length
    return effective


def with_perplexity(loss: MeanLoss) -> dict[str, Any]:
    """Return the fields of a loss, and its perplexity."""
    return {**asdict(loss), "perplexity": loss.perplexity}


def _score(answers: list[Outcome]) -> float:
    return sum(answer.retrieved for answer in answers) / len(answers)


def _grouped(outcomes: Iterable[Outcome], key: Callable[[Outcome], K]) -> dict[K, list[Outcome]]:
    groups: dict[K, list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(key(outcome), []).append(outcome)
    return groups
