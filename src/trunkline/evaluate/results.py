"""What an evaluation found: outcomes, and the scores that follow from them."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trunkline.evaluate.perplexity import DocumentLoss, MeanLoss, PositionLoss
from trunkline.evaluate.scoring import WAYS, Outcome, Way
from trunkline.evaluate.settings import EvaluateSettings


@dataclass(frozen=True)
class Cell:
    """The answers of a task at one length and depth.

    Attributes:
        way: `forced` or `generated`.
        task: name of the task.
        length: tokens of the samples.
        depth: of the answers; None where the task has no depth.
        score: share of them that was retrieved.
        num_answers: how many there are.
        loss: mean negative log likelihood of their tokens, in nats; None where generated.
    """

    way: Way
    task: str
    length: int
    depth: float | None
    score: float
    num_answers: int
    loss: float | None


@dataclass(frozen=True)
class Evaluation:
    """Outcomes of an evaluation, and scores.

    Attributes:
        settings: what was asked.
        outcomes: one for each answer and way.
        by_position: perplexity by position; empty where no documents were given.
        by_document: perplexity by document; empty likewise.
    """

    settings: EvaluateSettings
    outcomes: tuple[Outcome, ...]
    by_position: tuple[PositionLoss, ...] = ()
    by_document: tuple[DocumentLoss, ...] = ()

    @property
    def mean_loss(self) -> MeanLoss | None:
        """The mean over all tokens of all documents; None where no token of one was predicted."""
        counted = [loss for loss in self.by_document if loss.num_tokens]
        num_tokens = sum(loss.num_tokens for loss in counted)
        total = math.fsum(loss.num_tokens * loss.loss for loss in counted)
        return MeanLoss(num_tokens, total / num_tokens) if num_tokens else None

    @property
    def ways(self) -> list[Way]:
        """The ways that answers were scored in."""
        return [way for way in WAYS if any(outcome.way == way for outcome in self.outcomes)]

    def cells(self) -> list[Cell]:
        """Return the table way x task x length x depth, sorted by these, ways and tasks as they came."""
        groups = _grouped((o.way, o.task, o.length, o.depth) for o in self.outcomes)
        order = list(_grouped((o.way, o.task) for o in self.outcomes))
        found = []
        for key in sorted(groups, key=lambda k: (order.index(k[:2]), k[2], -1 if k[3] is None else k[3])):
            way, task, length, depth = key
            numbers = groups[key]
            answers = [self.outcomes[number] for number in numbers]
            log_probs = [o.log_prob for o in answers if o.log_prob is not None]
            loss = -sum(log_probs) / sum(o.num_tokens for o in answers) if log_probs else None
            found.append(Cell(way, task, length, depth, _score(answers), len(answers), loss))
        return found

    def task_scores(self, way: Way) -> dict[str, dict[int, float]]:
        """Return the share of answers that was retrieved, by task and length, over all depths and samples."""
        scores: dict[str, dict[int, float]] = {}
        chosen = [outcome for outcome in self.outcomes if outcome.way == way]
        for (task, length), numbers in _grouped((o.task, o.length) for o in chosen).items():
            scores.setdefault(task, {})[length] = _score([chosen[number] for number in numbers])
        return scores

    def length_scores(self, way: Way) -> dict[int, float]:
        """Return the mean of the tasks' scores at each length; every task counts the same."""
        by_task = self.task_scores(way).values()
        lengths = sorted({length for scores in by_task for length in scores})
        return {length: math.fsum(scores[length] for scores in by_task) / len(by_task) for length in lengths if by_task}

    def effective_length(self, way: Way, task: str | None = None) -> int | None:
        """Return the longest length up to which every length's score is at least the threshold.

        Args:
            way: `forced` or `generated`.
            task: of this task alone; None for the mean over all tasks.

        Returns:
            Tokens; None where the shortest length is below the threshold already, or nothing was scored that way.
        """
        scores = self.length_scores(way) if task is None else self.task_scores(way).get(task, {})
        return effective_length(scores, self.settings.threshold)

    def to_json(self) -> str:
        """Return everything as JSON: settings, scores, effective lengths, perplexities, every answer."""
        settings = asdict(self.settings)
        settings["tasks"] = [
            {"kind": type(task).__name__, **asdict(task)}  # type: ignore[call-overload]
            for task in self.settings.resolved_tasks
        ]
        found = {
            "settings": settings,
            "effective_length": {
                way: {
                    "mean": self.effective_length(way),
                    "tasks": {task: self.effective_length(way, task) for task in self.task_scores(way)},
                }
                for way in self.ways
            },
            "length_scores": {way: self.length_scores(way) for way in self.ways},
            "task_scores": {way: self.task_scores(way) for way in self.ways},
            "cells": [asdict(cell) for cell in self.cells()],
            "perplexity": {
                "mean": None if self.mean_loss is None else _with_perplexity(self.mean_loss),
                "by_position": [_with_perplexity(loss) for loss in self.by_position],
                "by_document": [_with_perplexity(loss) for loss in self.by_document],
            },
            "answers": [asdict(outcome) for outcome in self.outcomes],
        }
        return json.dumps(_finite(found), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_csv(self) -> str:
        """Return the table way x task x length x depth; a depth that a task does not have is empty."""
        columns = ["way", "task", "length", "depth", "score", "num_answers", "loss"]
        return _csv(columns, [asdict(cell) for cell in self.cells()])

    def perplexity_csv(self) -> str:
        """Return the perplexities by position, then by document; columns that a row does not have are empty."""
        columns = ["document", "first", "last", "num_tokens", "loss", "perplexity"]
        rows = [_with_perplexity(loss) for loss in self.by_position]
        rows += [{"document": loss.name, **_with_perplexity(loss)} for loss in self.by_document]
        return _csv(columns, rows)


def effective_length(scores: dict[int, float], threshold: float) -> int | None:
    """Return the longest length up to which every length's score is at least the threshold.

    Args:
        scores: by length in tokens.
        threshold: least score.

    Returns:
        Tokens, or None where not even the shortest reaches it.
    """
    effective = None
    for length, score in sorted(scores.items()):
        # A sum of exact shares over tasks may end a rounding below a threshold that it equals.
        if score < threshold - 1e-9:
            break
        effective = length
    return effective


def _score(answers: Sequence[Outcome]) -> float:
    return sum(answer.retrieved for answer in answers) / len(answers)


def _grouped(keys: Iterable[Any]) -> dict[Any, list[int]]:
    groups: dict[Hashable, list[int]] = {}
    for number, key in enumerate(keys):
        groups.setdefault(key, []).append(number)
    return groups


def _with_perplexity(loss: MeanLoss) -> dict[str, Any]:
    return {**asdict(loss), "perplexity": loss.perplexity}


def _finite(value: Any) -> Any:
    """Put null where a number is none: JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _csv(columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()
