"""A step in segments: what each took, moved and held, so that one can stand for others like it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

from trunkline.offload.lanes.sim_clock import Segment as LaneSegment
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.plan.device_memory import MemoryTally
from trunkline.report.timeline import thinned

MOST_POINTS = 2_000  # of the memory of one tier through one segment

Numbers = dict[str, float]


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Bytes of a tier through a segment, counted from what was held when it began.

    Attributes:
        peak: most.
        net: at its end.
        parts: what was held at the peak.
        net_parts: at the end.
        series: (second, bytes) through it.
    """

    peak: int
    net: int
    parts: Counter[str] = field(default_factory=Counter)
    net_parts: Counter[str] = field(default_factory=Counter)
    series: list[tuple[float, int]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StepSegment:
    """A part of a step.

    Attributes:
        phase: embed, forward, head or backward.
        layer: whose it is; None for what is no layer's.
        numbers: what grew in it, by name: seconds, FLOPs, bytes and seconds of lanes.
        engine: bytes that the engine's stores held, of each tier.
        whole: all bytes that were held, of each tier.
        lanes: what each did when, where it is drawn.
    """

    phase: str
    layer: int | None
    numbers: Numbers
    engine: dict[str, TierUsage]
    whole: dict[str, TierUsage]
    lanes: dict[str, list[LaneSegment]]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.numbers["seconds"]

    @property
    def label(self) -> str:
        """What is drawn on the line of compute."""
        return self.phase if self.layer is None else f"{self.phase} {self.layer}"


class SegmentRecorder:
    """Cuts a rehearsal into segments: a new one begins with every phase and with every layer.

    Args:
        clock: of the rehearsal.
        engine: bytes of the engine's stores: those held, and the most since it was last asked, of each tier.
        whole: all bytes held.
        numbers: everything else that grows.
        drawn: keep what happened when.

    Attributes:
        segments: so far.
    """

    def __init__(
        self,
        clock: SimClock,
        engine: Callable[[], dict[str, tuple[int, int]]],
        whole: Mapping[str, MemoryTally],
        numbers: Callable[[], Numbers],
        *,
        timeline: bool,
    ) -> None:
        self._clock, self._engine, self._whole, self._numbers = clock, engine, whole, numbers
        self.segments: list[StepSegment] = []
        self._phase = "embed"
        self._layer: int | None = None
        self._open()
        if timeline:
            for tier, tally in whole.items():
                tally.changed = partial(self._changed, tier)

    def enter(self, layer: int | None) -> None:
        """A layer begins."""
        if layer != self._layer:
            self._close()
            self._layer = layer
            if self._phase == "embed":
                self._phase = "forward"
            self._open()

    def phase(self, name: str) -> None:
        """A phase begins; layers that are entered in `embed` are in `forward`."""
        self._close()
        self._phase, self._layer = name, None
        self._open()

    def finish(self) -> None:
        """The step is over."""
        self._close()
        for tally in self._whole.values():
            tally.changed = None

    def _changed(self, tier: str, held: int) -> None:
        self._series[tier].append((self._clock.compute - self._begin, held - self._at_start[tier][0]))

    def _open(self) -> None:
        self._begin = self._clock.compute
        self._before = self._numbers()
        self._engine_before = {tier: held for tier, (held, _) in self._engine().items()}
        self._at_start = {tier: (tally.held, tally.parts.copy()) for tier, tally in self._whole.items()}
        self._series: dict[str, list[tuple[float, int]]] = {tier: [] for tier in self._whole}
        self._marks = self._clock.cut()
        for tally in self._whole.values():
            tally.begin()

    def _close(self) -> None:
        after = self._numbers()
        numbers = {name: value - self._before.get(name, 0.0) for name, value in after.items()}
        engine = {
            tier: TierUsage(peak - self._engine_before[tier], held - self._engine_before[tier])
            for tier, (held, peak) in self._engine().items()
        }
        whole = {}
        for tier, tally in self._whole.items():
            held, parts = self._at_start[tier]
            whole[tier] = TierUsage(
                tally.peak - held, tally.held - held, _minus(tally.at_peak, parts), _minus(tally.parts, parts),
                thinned(self._series[tier], numbers["seconds"], MOST_POINTS),
            )  # fmt: skip
        lanes = {
            lane: [(a - self._begin, b - self._begin, label) for a, b, label in recorded[self._marks.get(lane, 0) :]]
            for lane, recorded in self._clock.segments.items()
        }
        self.segments.append(StepSegment(self._phase, self._layer, numbers, engine, whole, lanes))


@dataclass(slots=True)
class Trace:
    """Segments one after another.

    Attributes:
        numbers: sums over all.
        engine: most bytes of the engine's stores, of each tier.
        whole: most bytes of all, of each tier.
        parts: what was held then.
        phases: (name, begin, end) in seconds.
        memory: (second, bytes) of each tier.
        lanes: what each did when.
    """

    numbers: Numbers = field(default_factory=dict)
    engine: dict[str, int] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    parts: dict[str, Counter[str]] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    memory: dict[str, list[tuple[float, int]]] = field(default_factory=dict)
    lanes: dict[str, list[LaneSegment]] = field(default_factory=dict)


def compose(segments: Iterable[StepSegment], start: Mapping[str, Counter[str]]) -> Trace:
    """Put segments one after another.

    Args:
        segments: in their order; one may come several times.
        start: what each tier holds before the first.
    """
    course, now = Trace(), 0.0
    engine: Counter[str] = Counter()
    parts = {tier: held.copy() for tier, held in start.items()}
    whole = {tier: held.total() for tier, held in start.items()}
    for tier, held in whole.items():
        course.whole[tier], course.parts[tier], course.memory[tier] = held, parts[tier].copy(), [(0.0, held)]
    for segment in segments:
        for name, value in segment.numbers.items():
            course.numbers[name] = course.numbers.get(name, 0) + value
        for tier, own in segment.engine.items():
            course.engine[tier] = max(course.engine.get(tier, 0), engine[tier] + own.peak)
            engine[tier] += own.net
        for tier, own in segment.whole.items():
            if whole[tier] + own.peak > course.whole[tier]:
                course.whole[tier] = whole[tier] + own.peak
                course.parts[tier] = _plus(parts[tier], own.parts)
            course.memory[tier] += [(now + second, whole[tier] + nbytes) for second, nbytes in own.series]
            whole[tier] += own.net
            parts[tier] = _plus(parts[tier], own.net_parts)
        for lane, recorded in segment.lanes.items():
            label = segment.label if lane == "compute" else None
            course.lanes.setdefault(lane, []).extend((now + a, now + b, label or own) for a, b, own in recorded)
        end = now + segment.seconds
        if course.phases and course.phases[-1][0] == segment.phase:
            course.phases[-1] = (segment.phase, course.phases[-1][1], end)
        else:
            course.phases.append((segment.phase, now, end))
        now = end
    return course


def _minus(a: Counter[str], b: Counter[str]) -> Counter[str]:
    return Counter({name: a[name] - b[name] for name in {*a, *b} if a[name] != b[name]})


def _plus(a: Counter[str], b: Counter[str]) -> Counter[str]:
    return Counter({name: a[name] + b[name] for name in {*a, *b}})
