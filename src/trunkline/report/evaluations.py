"""What a run's evaluations found, from `evaluations.jsonl`: curves over the steps, and a table of the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline.report.curves import Curve
from trunkline.report.words import percent_text
from trunkline.utils import json_fields

Scores = dict[str, dict[str, dict[int, float]]]


@dataclass(frozen=True)
class Found:
    """What one evaluation found; `trunkline.train.evaluating.EvaluationRecord` says what each field is.

    Attributes:
        step: after which it was.
        loss: of held-out files, nats a token; None where there are none.
        scores: share of answers retrieved, 0 to 1, of each way and task, by tokens of a sample.
        effective_length: of each way; None where the shortest length is below the threshold.
    """

    step: int
    loss: float | None
    scores: Scores
    effective_length: dict[str, int | None]

    @classmethod
    def of(cls, record: dict[str, Any]) -> Found:
        """Read a line.

        Raises:
            ValueError: something is missing or of another type.
        """
        loss = json_fields.member(record, "loss")
        reached = json_fields.mapping(json_fields.member(record, "effective_length"), "effective_length")
        return cls(
            step=json_fields.whole(json_fields.member(record, "step"), "step"),
            loss=None if loss is None else json_fields.number(loss, "loss"),
            scores={
                way: {task: _by_length(found, f"scores.{way}.{task}") for task, found in tasks.items()}
                for way, tasks in _objects(json_fields.member(record, "scores"), "scores").items()
            },
            effective_length={
                way: None if length is None else json_fields.whole(length, f"effective_length.{way}")
                for way, length in reached.items()
            },
        )


def evaluation_curves(evaluations: Sequence[Found]) -> list[Curve]:
    """Return the held-out loss and the mean score of each task over the steps, as far as there are any."""
    losses = [(found.step, found.loss) for found in evaluations if found.loss is not None]
    curves = []
    if losses:
        steps, values = [step for step, _ in losses], [loss for _, loss in losses]
        curves.append(Curve("Loss of held-out files, nats a token", steps, values, from_zero=False))
    for way, task in dict.fromkeys((w, t) for found in evaluations for w, tasks in found.scores.items() for t in tasks):
        known = [(found.step, by_length) for found in evaluations if (by_length := found.scores.get(way, {}).get(task))]
        means = [100 * sum(by_length.values()) / len(by_length) for _, by_length in known]
        title = f"Retrieved: {_task_name(way, task)}, %"
        curves.append(Curve(title, [step for step, _ in known], means, up_to=100.0))
    return curves


def score_rows(found: Found) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the rows of the table of one evaluation; no rows without scores."""
    lengths = sorted({n for tasks in found.scores.values() for by_length in tasks.values() for n in by_length})
    rows = []
    for way, tasks in found.scores.items():
        for task, by_length in tasks.items():
            cells = [percent_text(by_length[n]) if n in by_length else "" for n in lengths]
            rows.append([_task_name(way, task), *cells])
        reached = found.effective_length.get(way)
        effective = f"{reached:,} tokens" if reached is not None else f"below {lengths[0]:,} tokens" if lengths else ""
        rows.append([_task_name(way, "effective length"), effective, *[""] * (len(lengths) - 1)])
    return ["retrieved", *(f"{n:,} tokens" for n in lengths)], rows


def _task_name(way: str, task: str) -> str:
    return f"{task}, generated" if way == "generated" else task


def _objects(value: Any, what: str) -> dict[str, dict[str, Any]]:
    return {
        name: json_fields.mapping(inner, f"{what}.{name}") for name, inner in json_fields.mapping(value, what).items()
    }


def _by_length(value: Any, what: str) -> dict[int, float]:
    found = {}
    for length, share in json_fields.mapping(value, what).items():
        if not length.isdecimal():
            raise ValueError(f"{what} has {json_fields.shown(length)} for a number of tokens.")
        found[int(length)] = json_fields.amount(share, f"{what}.{length}")
    return found
