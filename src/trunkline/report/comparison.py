"""The plan against what was measured, figure by figure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trunkline.report.folder import Run
from trunkline.report.history import middle, settled
from trunkline.report.timeline import LANE_NAMES
from trunkline.report.words import bytes_text, percent_text, seconds_text, short_number
from trunkline.units import TIERS


@dataclass(frozen=True)
class Row:
    """A figure.

    Attributes:
        name: what it is.
        predicted: None if the plan does not say.
        measured: None if it was not.
        written: how people read it.
    """

    name: str
    predicted: float | None
    measured: float | None
    written: Callable[[float], str]

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True)
class Measured:
    """What a run was found to do in a step.

    Each is what it is in `folder.Plan`; None or absent where unknown.

    Attributes:
        source: where it is from, for people.
    """

    source: str
    seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    mfu_recompute_counted: float | None
    peaks: dict[str, int]
    exposed: dict[str, float]
    moved: dict[str, int]


def measured(run: Run) -> Measured | None:
    """Return what was measured: the measured timeline's step, else the middle of the steps after the first.

    Args:
        run: what its folder holds.

    Returns:
        None if nothing was measured.
    """
    timeline = run.timeline if run.timeline and run.timeline.source == "measured" else None
    if timeline is not None:
        peaks: dict[str, int] = {tier: most for tier in TIERS if (most := timeline.peak(tier)) is not None}
        return Measured(
            "the step of timeline.json",
            timeline.seconds,
            timeline.tokens_per_second,
            timeline.mfu,
            timeline.mfu_recompute_counted,
            peaks,
            timeline.exposed,
            timeline.moved,
        )
    if not run.history:
        return None
    steps = settled(run.history)
    lanes = [lane for lane in LANE_NAMES if all(lane in step.moved for step in steps)]
    # The engine's own account leaves out parameters, so the device's figure is the allocator's.
    held: dict[str, int] = {tier: max(step.tiers.get(tier, 0) for step in steps) for tier in TIERS[1:]}
    held["device"] = max(step.peak_memory_bytes for step in steps)
    flops = middle([None if step.model_flops is None else step.model_flops / step.seconds for step in steps])
    rehearsed = run.timeline
    peak = rehearsed.peak_flops * rehearsed.devices if rehearsed and rehearsed.peak_flops else None
    return Measured(
        "the middle of the steps after the first" if len(run.history) > 1 else "the run's only step",
        middle([step.seconds for step in steps]),
        middle([step.tokens_per_second for step in steps]),
        flops / peak if flops is not None and peak else None,
        None,
        held,
        {lane: middle([step.exposed[lane] for step in steps]) or 0.0 for lane in lanes},
        {lane: round(middle([step.moved[lane] for step in steps]) or 0) for lane in lanes},
    )


def compare(run: Run) -> list[Row]:
    """Return the rows of the table, none without a plan.

    Args:
        run: what its folder holds.
    """
    plan = run.plan
    if plan is None:
        return []
    found = measured(run) or Measured("", None, None, None, None, {}, {}, {})
    rows = [
        Row("step time", plan.seconds, found.seconds, seconds_text),
        Row("tokens/s, all devices", plan.tokens_per_second, found.tokens_per_second, short_number),
        Row("MFU, recomputation not counted", plan.mfu, found.mfu, percent_text),
        Row(
            "hardware FLOPs utilisation, recomputation counted",
            plan.mfu_recompute_counted,
            found.mfu_recompute_counted,
            percent_text,
        ),
    ]
    rows += [Row(f"peak of {tier}", plan.peaks.get(tier), found.peaks.get(tier), bytes_text) for tier in TIERS]
    rows += [
        Row(f"compute waited for {lane}", plan.exposed.get(lane), found.exposed.get(lane), seconds_text)
        for lane in LANE_NAMES
    ]
    rows += [Row(f"bytes over {lane}", plan.moved.get(lane), found.moved.get(lane), bytes_text) for lane in LANE_NAMES]
    # Nothing planned and nothing found, such as a disk that is not there, says nothing.
    return [row for row in rows if row.predicted is not None and (row.predicted or row.measured)]
