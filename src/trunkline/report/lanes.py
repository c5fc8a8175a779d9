"""The lanes of a step over time: a drawing that stands alone, and the data with which the page zooms into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trunkline.report.bands import STRIP, draw_bands
from trunkline.report.scale import ticks
from trunkline.report.svg import Frame, element, label
from trunkline.report.thin import busy_shares, thin_lanes
from trunkline.report.timeline import LANE_NAMES, Timeline

ROW, GAP = 34, 8


@dataclass(frozen=True)
class LaneTotals:
    """What a lane did in the step.

    Attributes:
        name: of the lane.
        busy: seconds that it worked, None where its segments are not known.
        moved: bytes, None for compute or where unknown.
        exposed: seconds that compute waited for it, None for compute or where unknown.
    """

    name: str
    busy: float | None
    moved: int | None
    exposed: float | None


def lane_totals(timeline: Timeline) -> list[LaneTotals]:
    """Return the totals of every lane of which anything is known."""
    known = [n for n in LANE_NAMES if n in timeline.lanes or n in timeline.moved or n in timeline.exposed]
    return [
        LaneTotals(
            name,
            timeline.busy(name) if name in timeline.lanes else None,
            timeline.moved.get(name),
            timeline.exposed.get(name),
        )
        for name in known
    ]


def drawn_lanes(timeline: Timeline) -> list[str]:
    """Return the lanes that have segments, in their order."""
    return [name for name in LANE_NAMES if timeline.lanes.get(name)]


def draw_lanes(timeline: Timeline, width: int) -> str:
    """Return the whole step: a row for each lane, as high as it is busy in that pixel."""
    names = drawn_lanes(timeline)
    height = STRIP + 6 + len(names) * (ROW + GAP) + 42
    frame = Frame(width, height, 76, STRIP + 6, 0.0, timeline.seconds, 0.0, 1.0)
    left, top, right, _ = frame.area
    content = draw_bands(frame, timeline.phases)
    content += frame.axes(ticks(0.0, timeline.seconds, width // 80), [], "seconds")
    for row, name in enumerate(names):
        y = top + GAP + row * (ROW + GAP)
        content += label(name, left - 8, y + ROW / 2 + 4, text_anchor="end", class_="lane")
        shares = busy_shares(timeline.lanes[name], timeline.seconds, right - left)
        content += element("path", d=_outline(shares, left, y + ROW), class_=f"segment {name}")
    return element(
        "svg",
        content,
        viewBox=f"0 0 {width} {height}",
        role="img",
        aria_label="Lanes over one step",
        class_="chart",
    )


def _outline(shares: Sequence[float], left: int, bottom: float) -> str:
    """Return a path around columns of a pixel, each as high as its share of a row."""
    parts, before = [f"M{left} {bottom:g}"], 0.0
    for column, share in enumerate(shares):
        # Anything at all is seen.
        height = max(1.0, round(share * ROW, 1)) if share else 0.0
        if height != before:
            parts.append(f"H{left + column}V{bottom - height:g}")
            before = height
    return "".join(parts) + f"H{left + len(shares)}V{bottom:g}Z"


def lane_data(timeline: Timeline) -> dict[str, Any]:
    """Return what the page's script draws from when someone zooms.

    Args:
        timeline: one step.

    Returns:
        `unit` seconds of a tick; `seconds`; `phases` (name, begin, end in ticks); `labels`; `lanes`, each a name and
        `segments`: gap since the segment before (ticks, negative where they overlap), length, number of the label, one
        after the other; `merged`, seconds below which neighbours are drawn as one, 0 where none are.
    """
    lanes, merged = thin_lanes({name: timeline.lanes[name] for name in drawn_lanes(timeline)}, timeline.seconds)
    unit = float(f"{timeline.seconds / 1e7:.3g}")
    numbers: dict[str, int] = {}
    written = []
    for name, segments in lanes.items():
        flat: list[int] = []
        reached = 0
        for begin, end, text in segments:
            first, last = round(begin / unit), round(end / unit)
            flat += [first - reached, last - first, numbers.setdefault(text, len(numbers))]
            reached = last
        written.append({"name": name, "segments": flat})
    return {
        "unit": unit,
        "seconds": timeline.seconds,
        "phases": [[p.name, round(p.begin / unit), round(p.end / unit)] for p in timeline.phases],
        "labels": list(numbers),
        "lanes": written,
        "merged": merged,
    }
