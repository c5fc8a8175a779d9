"""Summary of a run: the figures of its usual step, and the cards at the top of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from trunkline.report.number_format import count_text, percent_text, seconds_text, short_number
from trunkline.report.run_folder import LoggedStep, ReportedRun, StepFigures
from trunkline.report.timeline import LANE_NAMES, Timeline
from trunkline.units import TIERS, format_bytes


class MeasuredStep(StepFigures, frozen=True):
    """Figures of a step from a timeline, measured or estimated, or from the steps of a run.

    Attributes:
        source: Origin of the figures, for people.
        seconds: Duration.
        tokens: Tokens of the step, over all devices.
        tokens_per_second: Tokens of all devices per second.
        devices: Number of devices; None if unknown.
        flops_per_second: Model FLOP/s of all devices, recomputation not counted; None if unknown.
        recompute_flops_per_second: FLOP/s of all devices, recomputation counted; None if unknown.
    """

    source: str
    seconds: float
    tokens: int
    tokens_per_second: float
    devices: int | None
    flops_per_second: float | None
    recompute_flops_per_second: float | None = None


_TIMELINE = "the step of timeline.json"


def measured_step(run: ReportedRun) -> MeasuredStep | None:
    """Return the measured timeline's step, else the median of the steps after the first; None if neither exists.

    Peaks are not medians but the highest of all steps.
    """
    if run.timeline and run.timeline.source == "measured":
        return _from_timeline(run.timeline)
    return _from_steps(run.steps, run.timeline) if run.steps else None


def _from_timeline(step: Timeline) -> MeasuredStep:
    return MeasuredStep(
        source=_TIMELINE,
        seconds=step.seconds,
        tokens=step.tokens,
        tokens_per_second=step.tokens_per_second,
        devices=step.devices,
        flops_per_second=step.model_flops and step.model_flops / step.seconds,
        recompute_flops_per_second=step.hardware_flops and step.hardware_flops / step.seconds,
        mfu=step.mfu,
        mfu_recompute_counted=step.mfu_recompute_counted,
        peaks={tier: peak for tier in TIERS if (peak := step.peak(tier)) is not None},
        exposed=step.exposed,
        moved=step.moved,
    )


def _from_steps(steps: Sequence[LoggedStep], estimated: Timeline | None) -> MeasuredStep:
    # The first step compiles, allocates and warms up.
    settled = steps[1:] or steps
    rates = [step.model_flops / step.total_seconds for step in settled if step.model_flops is not None]
    rate = median(rates) if len(rates) == len(settled) else None
    # Only a timeline knows the devices and how fast one can be.
    peak_flops = estimated.peak_flops * estimated.devices if estimated and estimated.peak_flops else None
    lanes = [lane for lane in LANE_NAMES if all(lane in step.lanes for step in settled)]
    # The engine does not count parameters, so the device's figure is that of PyTorch's allocator.
    peaks = {"device": max(step.peak_memory_bytes for step in steps)}
    return MeasuredStep(
        source="the median of the steps after the first" if len(steps) > 1 else "the run's only step",
        seconds=median(step.total_seconds for step in settled),
        tokens=settled[-1].tokens,
        tokens_per_second=median(step.tokens_per_second for step in settled),
        devices=estimated.devices if estimated else None,
        flops_per_second=rate,
        mfu=rate / peak_flops if rate and peak_flops else None,
        peaks=peaks | {tier: max(step.tiers.get(tier, 0) for step in steps) for tier in TIERS[1:]},
        exposed={lane: median(step.lanes[lane].exposed_seconds for step in settled) for lane in lanes},
        moved={lane: round(median(step.lanes[lane].bytes for step in settled)) for lane in lanes},
    )


@dataclass(frozen=True)
class SummaryCard:
    """One figure at the top of the page.

    Attributes:
        name: Name of the figure.
        value: Value with its unit.
        note: Way of counting, or a value to compare with.
        share: Share of a capacity, 0 to 1, drawn as a bar; None for no bar.
    """

    name: str
    value: str
    note: str = ""
    share: float | None = None


def summary_cards(run: ReportedRun) -> list[SummaryCard]:
    """Return the cards of a run: of its measured step, else its steps, else the estimated step, else the plan.

    Steps of a run add a card of their loss.
    """
    step = measured_step(run) or (_from_timeline(run.timeline) if run.timeline else None)
    if step:
        cards = _step_cards(step, run)
    else:
        planned = run.plan.seconds if run.plan else None
        cards = [] if planned is None else [SummaryCard("Step time", seconds_text(planned), "as planned")]
    if run.steps:
        first, last = run.steps[0], run.steps[-1]
        note = f"from {first.loss:.4f}, {len(run.steps):,} steps" if len(run.steps) > 1 else "one step"
        cards.append(SummaryCard("Loss", f"{last.loss:.4f}", note))
    return cards


def _step_cards(step: MeasuredStep, run: ReportedRun) -> list[SummaryCard]:
    from_timeline = run.timeline is not None and step.source == _TIMELINE
    waited = f"{sum(step.exposed.values()) / step.seconds:.1%} of it waiting for moves"
    cards = [SummaryCard("Step time", seconds_text(step.seconds), waited if from_timeline else step.source)]
    devices = step.devices or 1
    name = "Tokens/s per device" if step.devices else "Tokens/s"
    where = f"{devices:,} device{'s' if devices > 1 else ''}" if step.devices else "all devices"
    speed = short_number(step.tokens_per_second / devices)
    cards.append(SummaryCard(name, speed, f"{step.tokens:,} tokens a step, {where}"))
    for name, kind, share, flops, counted in (
        ("MFU", "Model FLOPs", step.mfu, step.flops_per_second, "not counted"),
        (
            "Hardware FLOPs utilization",
            "Hardware FLOPs",
            step.mfu_recompute_counted,
            step.recompute_flops_per_second,
            "counted",
        ),
    ):
        note = f"causal attention, recomputation {counted}"
        if share is not None:
            cards.append(SummaryCard(name, percent_text(share), note))
        elif flops is not None:
            cards.append(SummaryCard(kind, f"{count_text(flops)}FLOP/s", f"all devices, {note}"))
    for tier in TIERS:
        if not (peak := step.peaks.get(tier)):
            continue
        capacity = run.timeline.capacity.get(tier) if run.timeline else None
        unchunked = run.before.peak(tier) if from_timeline and run.before else None
        notes = [f"of {format_bytes(capacity)}"] if capacity else []
        notes += [f"unchunked {format_bytes(unchunked)}"] if unchunked else []
        if not from_timeline:
            notes.append("first process" if tier == "device" else "held by the engine")
        share = min(1.0, peak / capacity) if capacity else None
        cards.append(SummaryCard(f"Peak of {tier}", format_bytes(peak), ", ".join(notes), share))
    return cards
