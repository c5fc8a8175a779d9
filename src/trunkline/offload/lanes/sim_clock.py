"""Simulated clock: the compute lane, and queues of work beside it.

Compute runs one operator after another, as fast as the host issues them. A queue works on its items in order, each from
the time when it is ready. Two directions of one link share its bandwidth, and a busy queue may slow compute down.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

LaneSegment = tuple[float, float, str]  # begin, end, label

_RESOLUTION = 1e-9  # seconds: events that are no further apart happen at once


@dataclass(frozen=True, slots=True)
class QueueSpeeds:
    """Speeds of the queues of one device.

    Attributes:
        alone: units a second of a queue while the other direction of its link is idle; without an entry, units are
            seconds.
        pairs: for a queue, the other direction of its link, and the units a second while both are busy.
        slowdown: share of compute's speed that is lost while a queue is busy.
        host_seconds: seconds in which the host issues an operator.
        synchronous: the host waits for each operator, as on a CPU.
    """

    alone: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    slowdown: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    synchronous: bool = False


@dataclass(slots=True)
class QueuedWork:
    """Item of a queue.

    Attributes:
        queue: name of the queue.
        left: units still to be done.
        ready: second from which it may begin.
        after: item that must end before; None for none.
        lane: lane that it is recorded and counted for.
        label: label of its segment.
        begin: second in which it began; NaN before.
        end: second in which it ended; infinity before.
    """

    queue: str
    left: float
    ready: float
    after: QueuedWork | None
    lane: str
    label: str
    begin: float = math.nan
    end: float = math.inf

    @property
    def earliest(self) -> float:
        """Earliest second at which the item may begin; infinity while the end of item `after` is unknown."""
        return self.ready if self.after is None else max(self.ready, self.after.end)


class SimClock:
    """Clock of one simulated device; see the module.

    Queues are simulated up to the time of compute and no further. So the order in which items are submitted does not
    change how they share a link: an item that is submitted later is ready later.

    Args:
        speeds: speeds of its queues.
        record: record the work of each lane over time.

    Attributes:
        compute: second in which compute ends its work so far.
        busy: seconds that each lane worked, `compute` included.
        exposed: seconds that compute waited for each lane.
        segments: work of each lane over time, where it is recorded.
    """

    def __init__(self, speeds: QueueSpeeds, *, record: bool = False) -> None:
        self._speeds = speeds
        self._record = record
        self._queues: dict[str, deque[QueuedWork]] = {}
        self._time = 0.0  # queues are simulated up to this second
        self._host = 0.0
        self.compute = 0.0
        self.busy: dict[str, float] = {"compute": 0.0}
        self.exposed: dict[str, float] = {}
        self.segments: dict[str, list[LaneSegment]] = {}
        self._cut: dict[str, int] = {}  # number of segments of each lane that later work must not extend

    def cut_segments(self) -> dict[str, int]:
        """Record later work in new segments; return the number of segments of each lane so far."""
        self._cut = {lane: len(segments) for lane, segments in self.segments.items()}
        return self._cut

    def issue(self) -> None:
        """Issue one operator from the host; on a synchronous host its time counts as compute."""
        if self._speeds.synchronous:
            self.run(self._speeds.host_seconds)
        else:
            self._host += self._speeds.host_seconds

    def run(self, seconds: float, label: str = "") -> None:
        """Run the issued operator on compute for `seconds`, or longer where busy queues slow it down."""
        begin = max(self.compute, self._host)
        self._simulate(begin)
        left = seconds
        while left > 0:
            working = self._working()
            speed = 1 - sum(self._speeds.slowdown.get(name, 0.0) for name in working)
            step = self._next_event(working)
            if left / speed <= step:
                step, left = left / speed, 0.0
            else:
                left -= step * speed
            self._advance(step, working)
        self.compute = self._time
        self.busy["compute"] += self.compute - begin
        self._record_segment("compute", begin, self.compute, label)
        if self._speeds.synchronous:
            self._host = self.compute

    def submit(
        self, queue: str, units: float, *, after: QueuedWork | None = None, lane: str = "", label: str = ""
    ) -> QueuedWork:
        """Queue an item; it may begin when compute has ended its work so far and the item `after` has ended.

        Args:
            queue: name of the queue.
            units: size of the item, in the units of the queue's speed.
            after: item that must end before; None for none.
            lane: lane that it is counted for; empty for the queue's name.
            label: label of its segment.

        Returns:
            The item, for `wait` or as `after` of another.
        """
        item = QueuedWork(queue, units, max(self.compute, self._host), after, lane or queue, label)
        self._queues.setdefault(queue, deque()).append(item)
        return item

    def wait(self, item: QueuedWork) -> None:
        """Make compute wait for an item, and count the seconds as exposed."""
        begin = max(self.compute, self._host)
        self._simulate(begin)
        while item.end == math.inf:
            working = self._working()
            self._advance(self._next_event(working), working)
        self.compute = max(begin, item.end)
        self.exposed[item.lane] = self.exposed.get(item.lane, 0.0) + self.compute - begin
        if self._speeds.synchronous:
            self._host = self.compute

    def _working(self) -> list[str]:
        """Return the queues that are busy now."""
        return [name for name, items in self._queues.items() if items and items[0].earliest <= self._time + _RESOLUTION]

    def _rate(self, name: str, working: list[str]) -> float:
        if name in self._speeds.pairs:
            other, together = self._speeds.pairs[name]
            if other in working:
                return together
        return self._speeds.alone.get(name, 1.0)

    def _next_event(self, working: list[str]) -> float:
        """Return the seconds until an item begins or ends; infinity if none will."""
        ends = [self._queues[name][0].left / self._rate(name, working) for name in working]
        begins = [
            items[0].earliest - self._time for name, items in self._queues.items() if items and name not in working
        ]
        return min([*ends, *begins], default=math.inf)

    def _simulate(self, until: float) -> None:
        """Advance the queues up to second `until`; do nothing if the clock is past it."""
        while self._time < until:
            working = self._working()
            step = self._next_event(working)
            if self._time + step >= until:
                self._advance(until - self._time, working)
                self._time = until
            else:
                self._advance(step, working)

    def _advance(self, step: float, working: list[str]) -> None:
        """Advance the queues by `step` seconds; no item may begin or end before the end of the step."""
        assert step < math.inf, "an item waits for one that never ends"
        rates = [self._rate(name, working) for name in working]
        for name, rate in zip(working, rates, strict=True):
            item = self._queues[name][0]
            if math.isnan(item.begin):
                item.begin = max(self._time, item.earliest)
            ended = item.left / rate <= step + _RESOLUTION
            item.left -= step * rate
            if ended:
                self._queues[name].popleft()
                item.left, item.end = 0.0, self._time + step
                self.busy[item.lane] = self.busy.get(item.lane, 0.0) + item.end - item.begin
                self._record_segment(item.lane, item.begin, item.end, item.label)
        self._time += step

    def _record_segment(self, lane: str, begin: float, end: float, label: str) -> None:
        if not self._record or end - begin <= _RESOLUTION:
            return
        segments = self.segments.setdefault(lane, [])
        is_open = len(segments) > self._cut.get(lane, 0)
        if is_open and segments[-1][2] == label and abs(begin - segments[-1][1]) <= _RESOLUTION:
            segments[-1] = (segments[-1][0], end, label)
        else:
            segments.append((begin, end, label))
