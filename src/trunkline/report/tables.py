"""Tables of the page, as text: lanes of a step, plan beside measurement, scores of an evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trunkline.report.number_format import percent_text, seconds_text, short_number
from trunkline.report.run_folder import LoggedEvaluation, ReportedRun, StepFigures
from trunkline.report.summary import measured_step
from trunkline.report.timeline import LANE_NAMES, Timeline
from trunkline.units import TIERS, format_bytes


@dataclass(frozen=True)
class ReportTable:
    """A table as text.

    Attributes:
        heads: Name of each column.
        rows: Cells of each row; the first one is its name.
    """

    heads: list[str]
    rows: list[list[str]]


def lane_table(timeline: Timeline) -> ReportTable:
    """Return busy time, bytes, bytes/s while busy, and exposed time of every lane that has any of these."""

    def duration(seconds: float) -> str:
        return f"{seconds_text(seconds)} ({seconds / timeline.seconds:.1%})"

    rows = []
    for lane in LANE_NAMES:
        if not (lane in timeline.lanes or lane in timeline.moved or lane in timeline.exposed):
            continue
        busy = timeline.busy(lane) if lane in timeline.lanes else None
        moved, exposed = timeline.moved.get(lane), timeline.exposed.get(lane)
        rows.append([
            lane,
            "" if busy is None else duration(busy),
            "" if moved is None else format_bytes(moved),
            f"{moved / busy / 1e9:.1f} GB/s" if moved and busy else "",
            "" if exposed is None else duration(exposed),
        ])  # fmt: skip
    return ReportTable(["lane", "busy", "moved", "while busy", "compute waited for it"], rows)


def plan_table(run: ReportedRun) -> ReportTable:
    """Return every known planned figure beside the measured one, and their ratio; no rows without a plan."""
    table = ReportTable(["", "predicted", "measured", "measured / predicted"], [])
    plan, step = run.plan, measured_step(run) or StepFigures()
    if plan is None:
        return table
    figures: list[tuple[str, float | None, float | None, Callable[[Any], str]]] = [
        ("step time", plan.seconds, step.seconds, seconds_text),
        ("tokens/s, all devices", plan.tokens_per_second, step.tokens_per_second, short_number),
        ("model FLOPs utilization, recomputation not counted", plan.mfu, step.mfu, percent_text),
        (
            "hardware FLOPs utilization, recomputation counted",
            plan.mfu_recompute_counted,
            step.mfu_recompute_counted,
            percent_text,
        ),
        *((f"peak of {tier}", plan.peaks.get(tier), step.peaks.get(tier), format_bytes) for tier in TIERS),
        *((f"compute waited for {x}", plan.exposed.get(x), step.exposed.get(x), seconds_text) for x in LANE_NAMES),
        *((f"bytes over {x}", plan.moved.get(x), step.moved.get(x), format_bytes) for x in LANE_NAMES),
    ]
    for name, predicted, measured, text in figures:
        # 0 planned and 0 measured, such as a disk that is not used, says nothing.
        if predicted is not None and (predicted or measured):
            ratio = f"{measured / predicted:.2f}" if measured is not None and predicted else ""
            table.rows.append([name, text(predicted), "" if measured is None else text(measured), ratio])
    return table


def score_table(evaluation: LoggedEvaluation) -> ReportTable:
    """Return the scores of one evaluation by task and length, and its effective lengths; no rows without scores."""
    by_task = [by_length for tasks in evaluation.scores.values() for by_length in tasks.values()]
    lengths = sorted({n for by_length in by_task for n in by_length})
    table = ReportTable(["retrieved", *(f"{n:,} tokens" for n in lengths)], [])
    for scoring, tasks in evaluation.scores.items():
        for task, by_length in tasks.items():
            cells = [percent_text(by_length[n]) if n in by_length else "" for n in lengths]
            table.rows.append([task_name(scoring, task), *cells])
        reached = evaluation.effective_length.get(scoring)
        effective = f"{reached:,} tokens" if reached is not None else f"below {lengths[0]:,} tokens" if lengths else ""
        table.rows.append([task_name(scoring, "effective length"), effective, *[""] * (len(lengths) - 1)])
    return table


def task_name(scoring: str, task: str) -> str:
    """Return a task's name on the page; generated answers are told apart from forced ones."""
    return f"{task}, generated" if scoring == "generated" else task
