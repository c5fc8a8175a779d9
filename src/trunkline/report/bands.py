"""The parts of a step as bands behind a chart of time, with their names in a strip above it."""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.report.svg import Frame, element, label, rectangle
from trunkline.report.timeline import Phase
from trunkline.report.words import seconds_text

STRIP = 20


def draw_bands(frame: Frame, phases: Sequence[Phase]) -> str:
    """Return a band for each phase; its name stands above it where it has room."""
    _, top, _, bottom = frame.area
    parts = []
    for phase in phases:
        begin, end = frame.x(phase.begin), frame.x(phase.end)
        tip = element("title", f"{phase.name}: {seconds_text(phase.end - phase.begin)}")
        parts.append(rectangle(begin, top, end - begin, bottom - top, class_=f"band {phase.name}"))
        parts.append(rectangle(begin, top - STRIP, end - begin, STRIP, tip, class_=f"strip {phase.name}"))
        if end - begin > 8.2 * len(phase.name):
            parts.append(label(phase.name, (begin + end) / 2, top - 6, text_anchor="middle", class_="phase"))
    return "".join(parts)
