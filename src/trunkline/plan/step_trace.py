"""Trace of a simulated step in segments, so that the segments of one layer can represent those of identical layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from trunkline.offload.lanes.sim_clock import LaneSegment, SimClock
from trunkline.plan.device_memory import MemoryTally
from trunkline.report.timeline import thinned

MOST_POINTS = 2_000  # of the memory of one tier through one segment

Counters = dict[str, float]  # growing numbers of a step, by name: seconds, FLOPs, bytes and seconds of lanes


@dataclass(frozen=True, slots=True)
class TallyUsage:
    """Bytes of a tally through a segment, above those held when the segment began.

    Attributes:
        peak: most bytes.
        net: bytes at the end; negative where the segment frees more than it allocates.
        parts: bytes at the peak, by label.
        net_parts: bytes at the end, by label.
        series: (second of the segment, bytes) after each change; empty where it is not recorded.
    """

    peak: int
    net: int
    parts: Counter[str]
    net_parts: Counter[str]
    series: list[tuple[float, int]]


@dataclass(frozen=True, slots=True)
class StepSegment:
    """Part of a step: one layer in one phase, or the work of a phase outside the layers.

    Attributes:
        phase: `embed`, `forward`, `head` or `backward`.
        layer: decoder layer; None outside the layers.
        counters: growth of each counter in this segment.
        memory: bytes of each tally, by its name.
        lanes: (begin, end, label) of each lane's work, in seconds of the segment; empty where it is not recorded.
    """

    phase: str
    layer: int | None
    counters: Counters
    memory: dict[str, TallyUsage]
    lanes: dict[str, list[LaneSegment]]

    @property
    def seconds(self) -> float:
        """Duration in seconds."""
        return self.counters["seconds"]

    @property
    def label(self) -> str:
        """Label of the segment on the compute lane of a report."""
        return self.phase if self.layer is None else f"{self.phase} {self.layer}"


class SegmentRecorder:
    """Recorder that cuts a simulated step into segments: one begins with each phase, and with each layer.

    Args:
        clock: clock of the step.
        memory: tallies by name: memory of each tier, and of parts of it.
        counters: returns all other growing numbers.
        timeline: record memory and lanes over time.

    Attributes:
        segments: segments that are over.
    """

    def __init__(
        self,
        clock: SimClock,
        memory: Mapping[str, MemoryTally],
        counters: Callable[[], Counters],
        *,
        timeline: bool,
    ) -> None:
        self._clock, self._memory, self._counters = clock, memory, counters
        self.segments: list[StepSegment] = []
        self._phase = "embed"
        self._layer: int | None = None
        self._open()
        if timeline:
            for tier, tally in memory.items():
                tally.on_change = partial(self._add_point, tier)

    def enter(self, layer: int | None) -> None:
        """Begin a segment of a layer, or with None outside the layers, unless it is the current one.

        In the phase `embed` this begins the phase `forward`.
        """
        if layer != self._layer:
            self._next("forward" if self._phase == "embed" else self._phase, layer)

    def begin_phase(self, name: str) -> None:
        """Begin a phase (`head` or `backward`), and with it a segment outside the layers."""
        self._next(name, None)

    def finish(self) -> None:
        """End the last segment and stop recording."""
        self._close()
        for tally in self._memory.values():
            tally.on_change = None

    def _next(self, phase: str, layer: int | None) -> None:
        self._close()
        self._phase, self._layer = phase, layer
        self._open()

    def _add_point(self, tier: str, held: int) -> None:
        self._series[tier].append((self._clock.compute - self._begin, held - self._held_before[tier][0]))

    def _open(self) -> None:
        self._begin = self._clock.compute
        self._counters_before = self._counters()
        self._held_before = {tier: (tally.held, tally.parts.copy()) for tier, tally in self._memory.items()}
        self._series: dict[str, list[tuple[float, int]]] = {tier: [] for tier in self._memory}
        self._lanes_before = self._clock.cut_segments()
        for tally in self._memory.values():
            tally.reset_peak()

    def _close(self) -> None:
        counters = {name: value - self._counters_before.get(name, 0.0) for name, value in self._counters().items()}
        memory = {}
        for name, tally in self._memory.items():
            held, parts = self._held_before[name]
            memory[name] = TallyUsage(
                tally.peak - held,
                tally.held - held,
                _growth(tally.parts_at_peak, parts),
                _growth(tally.parts, parts),
                thinned(self._series[name], counters["seconds"], MOST_POINTS),
            )
        lanes = {
            lane: [(a - self._begin, b - self._begin, label) for a, b, label in work[self._lanes_before.get(lane, 0) :]]
            for lane, work in self._clock.segments.items()
        }
        self.segments.append(StepSegment(self._phase, self._layer, counters, memory, lanes))


@dataclass(slots=True)
class Trace:
    """Trace of a whole step.

    Attributes:
        counters: sum of each counter.
        peaks: most bytes of each tally.
        parts: bytes of each tally at its peak, by label.
        phases: (name, begin, end) in seconds.
        memory: (second, bytes) of each tally: its start, and each change where that is recorded.
        lanes: (begin, end, label) of each lane's work, in seconds; empty where it is not recorded.
    """

    counters: Counters = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Counter[str]] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    lanes: dict[str, list[LaneSegment]] = field(default_factory=dict)


def join_segments(segments: Iterable[StepSegment], start: Mapping[str, Counter[str]]) -> Trace:
    """Join segments one after another into a trace.

    Args:
        segments: segments in order; one may come several times.
        start: bytes that each tally holds before the first segment, by label; every tally has an entry.
    """
    trace, now = Trace(), 0.0
    parts = {name: held.copy() for name, held in start.items()}
    held_now = {name: held.total() for name, held in start.items()}
    for name, held in held_now.items():
        trace.peaks[name], trace.parts[name], trace.memory[name] = held, parts[name].copy(), [(0.0, held)]
    for segment in segments:
        for counter, growth in segment.counters.items():
            trace.counters[counter] = trace.counters.get(counter, 0) + growth
        for name, usage in segment.memory.items():
            if held_now[name] + usage.peak > trace.peaks[name]:
                trace.peaks[name] = held_now[name] + usage.peak
                trace.parts[name] = parts[name].copy()
                trace.parts[name].update(usage.parts)
            trace.memory[name] += [(now + second, held_now[name] + nbytes) for second, nbytes in usage.series]
            held_now[name] += usage.net
            parts[name].update(usage.net_parts)
        for lane, work in segment.lanes.items():
            label = segment.label if lane == "compute" else None
            trace.lanes.setdefault(lane, []).extend((now + a, now + b, label or own) for a, b, own in work)
        end = now + segment.seconds
        if trace.phases and trace.phases[-1][0] == segment.phase:
            trace.phases[-1] = (segment.phase, trace.phases[-1][1], end)
        else:
            trace.phases.append((segment.phase, now, end))
        now = end
    return trace


def _growth(after: Counter[str], before: Counter[str]) -> Counter[str]:
    growth = after.copy()
    growth.subtract(before)  # unlike `-`, it keeps what is negative
    return growth
