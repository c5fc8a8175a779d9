"""Curves over the steps of a run: loss, speed, utilization, and results of evaluations."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.report.run_folder import ReportedRun
from trunkline.report.tables import task_name


@dataclass(frozen=True)
class StepCurve:
    """A value over the steps.

    Attributes:
        title: Name of the value with its unit.
        steps: Numbers of the steps.
        values: Value at each of them.
        from_zero: Whether the axis begins at zero.
        up_to: Value that the axis reaches at least.
    """

    title: str
    steps: list[int]
    values: list[float]
    from_zero: bool = True
    up_to: float = 0.0


def step_curves(run: ReportedRun) -> list[StepCurve]:
    """Return the curves that a run has values for."""
    curves: list[StepCurve] = []

    def add(title: str, points: list[tuple[int, float]], from_zero: bool = True, up_to: float = 0.0) -> None:
        if points:
            curves.append(StepCurve(title, [step for step, _ in points], [v for _, v in points], from_zero, up_to))

    # Only a timeline knows the devices and how fast one can be.
    devices = run.timeline.devices if run.timeline else None
    peak = run.timeline.peak_flops * run.timeline.devices if run.timeline and run.timeline.peak_flops else None
    add("Loss, nats a token", [(step.step, step.loss) for step in run.steps], from_zero=False)
    add(
        "Tokens/s per device" if devices else "Tokens/s, all devices",
        [(step.step, step.tokens_per_second / (devices or 1)) for step in run.steps],
    )
    rates = [(step.step, step.model_flops / step.total_seconds) for step in run.steps if step.model_flops is not None]
    if peak:
        add("MFU, % (causal, recomputation not counted)", [(step, 100 * rate / peak) for step, rate in rates])
    else:
        add("Model TFLOP/s, all devices", [(step, rate / 1e12) for step, rate in rates])

    losses = [(found.step, found.loss) for found in run.evaluations if found.loss is not None]
    add("Loss of held-out files, nats a token", losses, from_zero=False)
    names = [(scoring, task) for found in run.evaluations for scoring, tasks in found.scores.items() for task in tasks]
    for scoring, task in dict.fromkeys(names):
        scores = [(found.step, found.scores.get(scoring, {}).get(task)) for found in run.evaluations]
        means = [(step, 100 * sum(by_length.values()) / len(by_length)) for step, by_length in scores if by_length]
        add(f"Retrieved: {task_name(scoring, task)}, %", means, up_to=100.0)
    return curves
