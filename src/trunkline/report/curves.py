"""Charts of a value over the steps of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.report.history import Step
from trunkline.report.scale import ticks, whole_ticks
from trunkline.report.svg import Frame, element
from trunkline.report.timeline import Timeline

MOST_POINTS = 600


@dataclass(frozen=True)
class Curve:
    """A value of each step.

    Attributes:
        title: what it is, with its unit.
        steps: numbers of the steps.
        values: of them.
        from_zero: the axis begins at zero.
        up_to: it reaches so far at least.
    """

    title: str
    steps: list[int]
    values: list[float]
    from_zero: bool = True
    up_to: float | None = None


def curves_of(history: Sequence[Step], timeline: Timeline | None) -> list[Curve]:
    """Return loss, speed and utilisation over the steps, as far as they are known.

    Args:
        history: steps of the run.
        timeline: says how many devices there are and how fast one could be.
    """
    if not history:
        return []
    steps = [step.step for step in history]
    devices = timeline.devices if timeline else None
    speed = "tokens/s per device" if devices else "tokens/s, all devices"
    found = [
        Curve("Loss, nats a token", steps, [step.loss for step in history], from_zero=False),
        Curve(speed[0].upper() + speed[1:], steps, [s.tokens_per_second / (devices or 1) for s in history]),
    ]
    flops = [(step.step, step.model_flops / step.seconds) for step in history if step.model_flops is not None]
    peak = timeline.peak_flops * timeline.devices if timeline and timeline.peak_flops else None
    if flops:
        title = "MFU, % (causal, recomputation not counted)" if peak else "Model TFLOP/s, all devices"
        found.append(Curve(title, [at for at, _ in flops], [v * 100 / peak if peak else v / 1e12 for _, v in flops]))
    return found


def draw_curve(curve: Curve, width: int = 360, height: int = 220) -> str:
    """Return the chart of one curve."""
    points = _thinned(list(zip(curve.steps, curve.values, strict=True)))
    low, high = min(value for _, value in points), max(value for _, value in points)
    low = 0.0 if curve.from_zero else low
    high = high if curve.up_to is None else max(high, curve.up_to)
    margin = (high - low) * 0.08 or abs(high) * 0.1 or 1.0
    low, high = (0.0 if curve.from_zero else low - margin), high + margin
    first, last = points[0][0], points[-1][0]
    if first == last:
        first, last = first - 1, last + 1
    y_ticks = ticks(low, high, 4)
    frame = Frame(width, height, 18 + 8 * max(len(text) for _, text in y_ticks), 12, first, last, low, high)
    places = [(frame.x(step), frame.y(value)) for step, value in points]
    path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    dots = [element("circle", cx=x, cy=y, r=3, class_="dot") for x, y in places] if len(places) <= 40 else []
    shown_ticks = [tick for tick in whole_ticks(first, last, 5) if curve.steps[0] <= tick[0] <= curve.steps[-1]]
    content = frame.axes(shown_ticks, y_ticks, "step") + element("path", d=path, class_="curve") + "".join(dots)
    hover = {
        "kind": "number",
        "at": [round(x, 1) for x, _ in places],
        "heads": [f"step {step:,}" for step, _ in points],
        "values": [float(f"{value:.6g}") for _, value in points],
    }
    return frame.drawing(content, f"{curve.title}, over steps", hover)


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Keep the lowest and the highest point of each stretch, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    stretches = MOST_POINTS // 2 - 1
    kept = {0, len(points) - 1}
    for index in range(stretches):
        within = range(index * len(points) // stretches, (index + 1) * len(points) // stretches)
        kept |= {min(within, key=lambda i: points[i][1]), max(within, key=lambda i: points[i][1])}
    return [points[i] for i in sorted(kept)]
