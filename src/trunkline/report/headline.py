"""The figures at the top of the page: how fast, how well the hardware is used, how full each tier gets."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.report.folder import Run
from trunkline.report.history import middle, settled
from trunkline.report.timeline import Timeline
from trunkline.report.words import bytes_text, count_text, percent_text, seconds_text, short_number
from trunkline.units import TIERS


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: what it is.
        value: with its unit.
        note: what it is to be compared with, or how it is counted.
        share: of a capacity, 0 to 1, for a bar; None for none.
    """

    name: str
    value: str
    note: str = ""
    share: float | None = None


def headline(run: Run) -> list[Figure]:
    """Return the figures of a run: of its measured step, else of its history, else of a rehearsed step, else planned.

    Args:
        run: what its folder holds.
    """
    if run.timeline and (run.timeline.source == "measured" or not run.history):
        figures = _of_timeline(run.timeline, run.before)
    elif run.history:
        figures = _of_history(run)
    else:
        planned = None if run.plan is None else run.plan.seconds
        figures = [] if planned is None else [Figure("Step time", seconds_text(planned), "as planned")]
    if run.history:
        first, last = run.history[0], run.history[-1]
        note = f"from {first.loss:.4f}, {len(run.history):,} steps" if len(run.history) > 1 else "one step"
        figures.append(Figure("Loss", f"{last.loss:.4f}", note))
    return figures


def _of_timeline(timeline: Timeline, before: Timeline | None) -> list[Figure]:
    waited = sum(timeline.exposed.values())
    figures = [
        Figure("Step time", seconds_text(timeline.seconds), f"{waited / timeline.seconds:.1%} of it waiting for moves"),
        Figure(
            "Tokens/s per device",
            short_number(timeline.tokens_per_second / timeline.devices),
            f"{timeline.tokens:,} tokens, {_devices(timeline)}",
        ),
    ]
    for name, share, flops, note in (
        ("MFU", timeline.mfu, timeline.model_flops, "causal attention, recomputation not counted"),
        (
            "Hardware FLOPs utilisation",
            timeline.mfu_recompute_counted,
            timeline.hardware_flops,
            "causal attention, recomputation counted",
        ),
    ):
        if share is not None:
            figures.append(Figure(name, percent_text(share), note))
        elif flops is not None:
            counted = f"{count_text(flops / timeline.seconds)}FLOP/s"
            figures.append(Figure(name.replace("MFU", "Model FLOPs").replace(" utilisation", ""), counted, note))
    for tier in TIERS:
        unchunked = before.peak(tier) if before else None
        note = f"unchunked {bytes_text(unchunked)}" if unchunked else ""
        if peak := timeline.peak(tier):
            figures.append(_peak(f"Peak of {tier}", peak, timeline.capacity.get(tier), note))
    return figures


def _of_history(run: Run) -> list[Figure]:
    steps = settled(run.history)
    seconds = middle([step.seconds for step in steps]) or 0.0
    speed = middle([step.tokens_per_second for step in steps]) or 0.0
    flops = middle([None if step.model_flops is None else step.model_flops / step.seconds for step in steps])
    usual = "median of the steps after the first" if len(run.history) > 1 else "the only step"
    figures = [Figure("Step time", seconds_text(seconds), usual)]
    # A rehearsed step beside them knows the devices, which the steps do not.
    rehearsed = run.timeline
    if rehearsed is not None:
        note = f"{steps[-1].tokens:,} tokens a step, {_devices(rehearsed)}"
        figures.append(Figure("Tokens/s per device", short_number(speed / rehearsed.devices), note))
    else:
        figures.append(Figure("Tokens/s", short_number(speed), f"all devices, {steps[-1].tokens:,} tokens a step"))
    if flops is not None and rehearsed is not None and rehearsed.peak_flops is not None:
        share = flops / (rehearsed.peak_flops * rehearsed.devices)
        figures.append(Figure("MFU", percent_text(share), "causal attention, recomputation not counted"))
    elif flops is not None:
        note = "all devices, causal attention, recomputation not counted"
        figures.append(Figure("Model FLOPs", f"{count_text(flops)}FLOP/s", note))
    capacity = rehearsed.capacity if rehearsed else {}
    most = max(step.peak_memory_bytes for step in run.history)
    figures.append(_peak("Peak memory", most, capacity.get("device"), "first process"))
    for tier in TIERS[1:]:
        if held := max(step.tiers.get(tier, 0) for step in run.history):
            figures.append(_peak(f"Peak of {tier}", held, capacity.get(tier), "held by the engine"))
    return figures


def _devices(timeline: Timeline) -> str:
    return f"{timeline.devices:,} device{'s' if timeline.devices > 1 else ''}"


def _peak(name: str, held: int, capacity: int | None, note: str) -> Figure:
    notes = [f"of {bytes_text(capacity)}"] if capacity else []
    return Figure(
        name,
        bytes_text(held),
        ", ".join([*notes, *([note] if note else [])]),
        min(1.0, held / capacity) if capacity else None,
    )
