"""Records in a run's folder: steps, evaluations, plan and timelines. A missing file is left out of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from pydantic import BaseModel, model_validator

from trunkline.report.timeline import Timeline
from trunkline.utils.json_records import Amount, Count, Real, read_json

METRICS, EVALUATIONS, RECIPE = "metrics.jsonl", "evaluations.jsonl", "recipe.yaml"
TIMELINE, PLAN, BEFORE = "timeline.json", "plan.json", "before.json"

T = TypeVar("T")


class LaneTotals(BaseModel, frozen=True):
    """Bytes that a lane of the first rank moved in a step, and seconds that its compute waited for the lane."""

    bytes: Count
    exposed_seconds: Amount


class LoggedStep(BaseModel, frozen=True):
    """A line of `metrics.jsonl`; `trunkline.train.step_metrics.StepMetrics` explains the fields."""

    step: Count
    loss: Real
    tokens: Count
    seconds: dict[str, Amount]
    model_flops: Count | None
    peak_memory_bytes: Count
    tiers: dict[str, Count]
    lanes: dict[str, LaneTotals]

    @model_validator(mode="after")
    def _takes_time(self) -> Self:
        if not self.total_seconds > 0:
            raise ValueError("seconds are 0 in all parts, and a step takes longer.")
        return self

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole step: the sum over its parts."""
        return sum(self.seconds.values())

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices per second."""
        return self.tokens / self.total_seconds


class LoggedEvaluation(BaseModel, frozen=True):
    """A line of `evaluations.jsonl`; `trunkline.train.evaluating.EvaluationRecord` explains the fields.

    Attributes:
        step: Step before the evaluation.
        loss: Loss of held-out files in nats a token; None without such files.
        scores: Share of answers retrieved, 0 to 1, by scoring (forced or generated), task, and tokens of a sample.
        effective_length: Tokens by scoring; None where the shortest length is below the threshold.
    """

    step: Count
    loss: Real | None
    scores: dict[str, dict[str, dict[Count, Amount]]]
    effective_length: dict[str, Count | None]


class StepFigures(BaseModel, frozen=True):
    """Figures of one step, planned or measured. An unknown figure is None or absent.

    Peaks, waits and moves are those of the first rank.

    Attributes:
        seconds: Duration.
        tokens_per_second: Tokens of all devices per second.
        mfu: Model FLOPs utilization, 0 to 1, recomputation not counted.
        mfu_recompute_counted: Hardware FLOPs utilization, 0 to 1, recomputation counted.
        peaks: Peak bytes by tier.
        exposed: Seconds that compute waits, by lane.
        moved: Bytes by lane.
    """

    seconds: Amount | None = None
    tokens_per_second: Amount | None = None
    mfu: Amount | None = None
    mfu_recompute_counted: Amount | None = None
    peaks: dict[str, Count] = {}
    exposed: dict[str, Amount] = {}
    moved: dict[str, Count] = {}


class PlannedStep(StepFigures, frozen=True):
    """Predictions of `plan.json`, and the name of the hardware that they are for."""

    hardware: str = ""


@dataclass(frozen=True)
class ReportedRun:
    """Contents of a run's folder.

    Attributes:
        name: Name of the folder.
        steps: Steps of training; empty if there is no `metrics.jsonl`.
        evaluations: Evaluations between the steps; empty if there were none.
        recipe: Text of the recipe; None if there is no `recipe.yaml`.
        timeline: One step over time; None if there is no `timeline.json`.
        before: One step of the same model, unchunked; None if there is no `before.json`.
        plan: Predictions; None if there is no `plan.json`.
    """

    name: str
    steps: list[LoggedStep]
    evaluations: list[LoggedEvaluation]
    recipe: str | None
    timeline: Timeline | None
    before: Timeline | None
    plan: PlannedStep | None

    @property
    def title(self) -> str:
        """Title of the report: the timeline's, else the name of the folder."""
        return self.timeline.title if self.timeline else self.name


def read_run(folder: Path) -> ReportedRun:
    """Read a run's folder.

    Args:
        folder: Folder with any of metrics.jsonl, evaluations.jsonl, recipe.yaml, timeline.json, plan.json, before.json.

    Raises:
        ValueError: The folder does not exist, holds nothing to report, or a file in it is broken.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"'{folder}' {kind}: report takes the folder of a run, such as the output of trunkline train.")
    run = ReportedRun(
        name=folder.resolve().name,
        steps=_read(folder / METRICS, lambda text: _read_lines(LoggedStep, text)) or [],
        evaluations=_read(folder / EVALUATIONS, lambda text: _read_lines(LoggedEvaluation, text)) or [],
        recipe=_read(folder / RECIPE, str),
        timeline=_read(folder / TIMELINE, Timeline.from_json),
        before=_read(folder / BEFORE, Timeline.from_json),
        plan=_read(folder / PLAN, lambda text: read_json(PlannedStep, text)),
    )
    if not (run.steps or run.timeline or run.before or run.plan):
        raise ValueError(
            f"'{folder}' has nothing to report: there is neither {METRICS} with a step in it (trunkline train writes "
            f"it), nor {TIMELINE}, {BEFORE} or {PLAN} (trunkline train and trunkline plan --step write them). Give "
            "the folder of a run."
        )
    return run


def _read(path: Path, read: Callable[[str], T]) -> T | None:
    if not path.is_file():
        return None
    try:
        return read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} Write the file again, or move it away: the report then leaves its part out."
        ) from error


def _read_lines(record: type[T], text: str) -> list[T]:
    records = []
    # A last line without its end is one that a run is still writing.
    for number, line in enumerate(text.split("\n")[:-1], start=1):
        if line.strip():
            try:
                records.append(read_json(record, line))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return records
