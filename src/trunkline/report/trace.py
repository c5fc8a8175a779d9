"""A step as a trace that Perfetto and Chrome open: lanes as threads, memory as counters.

The format is the Trace Event Format's JSON: events of kind X (a span), C (a counter) and M (a name), times in
microseconds. https://ui.perfetto.dev opens the file, and keeps it on the reader's machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from trunkline.report.timeline import LANE_NAMES, Segment, Timeline
from trunkline.units import TIERS

Event = dict[str, Any]


def make_trace(timeline: Timeline, before: Timeline | None = None) -> str:
    """Return the trace as JSON.

    Args:
        timeline: one step; process 1 of the trace.
        before: the unchunked step, process 2.
    """
    events = list(_events(timeline, 1, timeline.title))
    if before is not None:
        events += _events(before, 2, f"before: {before.title}")
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":"), allow_nan=False)


def _events(timeline: Timeline, process: int, title: str) -> Iterator[Event]:
    yield _metadata("process_name", process, 0, name=title)
    phases = [(phase.begin, phase.end, str(phase.name)) for phase in timeline.phases]
    for thread, (name, segments) in enumerate(
        [("phases", phases), *((lane, timeline.lanes.get(lane, [])) for lane in LANE_NAMES)], start=1
    ):
        if segments:
            yield _metadata("thread_name", process, thread, name=name)
            yield _metadata("thread_sort_index", process, thread, sort_index=thread)
            yield from (_span(segment, name, process, thread) for segment in sorted(segments))
    for tier in TIERS:
        for second, held in timeline.memory.get(tier, []):
            yield {"ph": "C", "name": tier, "pid": process, "ts": _microseconds(second), "args": {"bytes": held}}


def _metadata(kind: str, process: int, thread: int, **values: Any) -> Event:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": values}


def _span(segment: Segment, category: str, process: int, thread: int) -> Event:
    begin, end = _microseconds(segment[0]), _microseconds(segment[1])
    # The duration is between rounded ends: rounded by itself, a span could reach into the next one.
    duration = round(end - begin, 3)
    return {"ph": "X", "name": segment[2], "cat": category, "pid": process, "tid": thread, "ts": begin, "dur": duration}


def _microseconds(seconds: float) -> float:
    return round(seconds * 1e6, 3)
