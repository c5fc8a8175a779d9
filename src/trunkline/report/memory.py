"""Charts of memory: each tier through one step, and what holds the bytes when it is fullest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trunkline.report.bands import STRIP, draw_bands
from trunkline.report.scale import byte_ticks, byte_unit, round_up, ticks
from trunkline.report.svg import Frame, element, label, line
from trunkline.report.thin import columns
from trunkline.report.timeline import Timeline
from trunkline.report.words import bytes_text

MOST_HOLDERS = 8
FAR = 4  # a capacity of more than so many peaks would make all else too small to see


def highest(timelines: Sequence[Timeline], tier: str) -> int:
    """Return the most bytes that a chart of a tier must show: its peaks, and its capacity unless that is far away."""
    peak = max(timeline.peak(tier) or 0 for timeline in timelines)
    near = [c for timeline in timelines if (c := timeline.capacity.get(tier)) is not None and c <= FAR * peak]
    return max([peak, *near])


def draw_memory(timeline: Timeline, tier: str, width: int, *, most: float, seconds: float, height: int = 280) -> str:
    """Return the chart of one tier through the step.

    Args:
        timeline: it knows this tier's memory.
        tier: device, host or disk.
        width: of the drawing.
        most: bytes at the top of the scale, at least.
        seconds: at the right end of the scale; two steps side by side have the same.
        height: of the drawing.
    """
    unit, _ = byte_unit(most)
    top = round_up(most / unit, 5) * unit
    y_ticks = byte_ticks(top, 5)
    frame = Frame(
        width, height, 18 + 8 * max(len(text) for _, text in y_ticks), STRIP + 6, 0.0, seconds, 0.0, top, bottom=42
    )
    left, _, right, bottom = frame.area
    share = timeline.seconds / seconds
    count = max(1, round((right - left) * share))
    low, high = columns(timeline.memory[tier], timeline.seconds, count)
    end = frame.x(timeline.seconds)
    content = draw_bands(frame, timeline.phases)
    content += frame.axes(ticks(0.0, seconds, width // 80), y_ticks, "seconds")
    for values, name in ((high, "high"), (low, "low")):
        outline = _steps(frame, values, end)
        content += element("path", d=f"M{left} {bottom}V{outline}V{bottom}Z", class_=f"area {name}")
    content += element("path", d=f"M{left} {_steps(frame, high, end)}", class_="curve memory")
    capacity = timeline.capacity.get(tier)
    if capacity is not None and capacity <= top:
        y = frame.y(capacity)
        content += line(left, y, right, y, class_="capacity")
        below = y + 15 if y - frame.top < 16 else y - 5
        content += label(f"capacity {bytes_text(capacity)}", right - 4, below, text_anchor="end", class_="capacity")
    hover = {
        "kind": "bytes",
        "end": round(end, 1),
        "seconds": float(f"{timeline.seconds:.6g}"),
        "values": [int(float(f"{value:.4g}")) for value in high],
        "phases": [[p.name, float(f"{p.begin:.6g}"), float(f"{p.end:.6g}")] for p in timeline.phases],
    }
    return frame.drawing(content, f"{tier} memory through one step", hover)


def _steps(frame: Frame, values: Sequence[int], end: float) -> str:
    """Return the outline of columns, without its beginning: a path goes on from the left edge."""
    left = frame.left
    parts, before = [], None
    for index, value in enumerate(values):
        if value != before:
            x = left + (end - left) * index / len(values)
            y = f"{frame.y(value):.1f}"
            parts.append(y if before is None else f"H{x:.1f}V{y}")
            before = value
    return "".join(parts) + f"H{end:.1f}"


@dataclass(frozen=True)
class Share:
    """A part of what a tier holds at its peak.

    Attributes:
        name: what it is.
        nbytes: of it.
        colour: number of its colour, the same for the same name in every tier; None for what is free.
    """

    name: str
    nbytes: int
    colour: int | None


def shares_of(timeline: Timeline, tier: str) -> list[Share]:
    """Return what holds a tier's peak: the largest first, what is not told apart, and what is free where it is near.

    Args:
        timeline: one step.
        tier: device, host or disk.
    """
    order = _order(timeline)
    named = sorted(timeline.holders.get(tier, {}).items(), key=lambda item: (-item[1], item[0]))
    named = [(name, n) for name, n in named if n]
    shares = [Share(name, n, order.index(name)) for name, n in named if name in order]
    rest = sum(n for name, n in named if name not in order)
    held = sum(n for _, n in named)
    other = rest + max(0, (timeline.peak(tier) or 0) - held)
    if other and shares:
        shares.append(Share("other", other, MOST_HOLDERS - 1))
    capacity = timeline.capacity.get(tier)
    if capacity is not None and held < capacity <= FAR * held:
        free = capacity - max(held, timeline.peak(tier) or 0)
        shares += [Share("free", free, None)] if shares and free > 0 else []
    return shares


def _order(timeline: Timeline) -> list[str]:
    """Return the names that get colours of their own: those that hold most, over all tiers."""
    totals: dict[str, int] = {}
    for held in timeline.holders.values():
        for name, n in held.items():
            totals[name] = totals.get(name, 0) + n
    return sorted(totals, key=lambda name: (-totals[name], name))[: MOST_HOLDERS - 1]
