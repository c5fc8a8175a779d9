"""The time of a machine that is not there: compute, and queues of work beside it.

Compute does one thing after another, as fast as the host issues it. A queue does its jobs in their order, each from the
time when it is ready; two directions of one link share what both can carry at once, and compute may be slower while a
queue works. All is simulated as far as compute has come and no further, so that how jobs share a link depends on no
order in which anybody asks: what is given later is ready later.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

Segment = tuple[float, float, str]  # begin, end, label

_RESOLUTION = 1e-9  # seconds: what is no further apart is at once


@dataclass(frozen=True, slots=True)
class QueueSpeeds:
    """How fast queues work.

    Attributes:
        alone: units a second of each queue while its pair rests; seconds of work where there is none.
        pairs: for a queue the other direction of its link, and the units a second while both are busy.
        slowdown: share of compute's speed that is lost while a queue works.
        host_seconds: the host takes to issue an operator.
        synchronous: the host waits for each operator, as on a CPU.
    """

    alone: Mapping[str, float] = field(default_factory=dict)
    pairs: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    slowdown: Mapping[str, float] = field(default_factory=dict)
    host_seconds: float = 0.0
    synchronous: bool = False


@dataclass(slots=True)
class QueuedWork:
    """Work in a queue.

    Attributes:
        queue: its name.
        left: units still to be done.
        ready: second from which it may begin.
        after: a job that must be over before; None for none.
        lane: on whose line it is drawn.
        label: what it says there.
        begin: when it began.
        end: when it was over; infinity while it is not.
    """

    queue: str
    left: float
    ready: float
    after: QueuedWork | None
    lane: str
    label: str
    begin: float = math.nan
    end: float = math.inf


class SimClock:
    """See the module.

    Args:
        speeds: of queues that `submit` names.
        drawn: keep what each lane did when.

    Attributes:
        compute: second at which all that compute was given is over.
        busy: seconds that each lane worked, compute too.
        exposed: seconds that compute waited for each lane.
        segments: what each lane did when, where it is drawn.
    """

    def __init__(self, speeds: QueueSpeeds, *, record: bool = False) -> None:
        self._speeds = speeds
        self._record = record
        self._queues: dict[str, deque[QueuedWork]] = {}
        self._time = 0.0  # up to which queues have been simulated
        self._host = 0.0
        self.compute = 0.0
        self.busy: dict[str, float] = {"compute": 0.0}
        self.exposed: dict[str, float] = {}
        self.segments: dict[str, list[Segment]] = {}
        self._cut: dict[str, int] = {}  # segments of each lane that are not drawn on

    def cut(self) -> dict[str, int]:
        """Draw what is over from now on as segments of its own; how many each lane has so far."""
        self._cut = {lane: len(segments) for lane, segments in self.segments.items()}
        return self._cut

    def issue(self) -> None:
        """The host issues an operator; where it waits for each, compute does nothing else meanwhile."""
        if self._speeds.synchronous:
            self.run(self._speeds.host_seconds)
        else:
            self._host += self._speeds.host_seconds

    def run(self, seconds: float, label: str = "") -> None:
        """Compute works for so many seconds, or longer where queues slow it down."""
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
        self._draw("compute", begin, self.compute, label)
        if self._speeds.synchronous:
            self._host = self.compute

    def submit(
        self, queue: str, units: float, *, after: QueuedWork | None = None, lane: str = "", label: str = ""
    ) -> QueuedWork:
        """Put work into a queue: ready once compute has done what it was given so far, and `after` is over."""
        job = QueuedWork(queue, units, max(self.compute, self._host), after, lane or queue, label)
        self._queues.setdefault(queue, deque()).append(job)
        return job

    def wait(self, job: QueuedWork) -> None:
        """Compute goes on only after a job."""
        begin = max(self.compute, self._host)
        self._simulate(begin)
        while job.end == math.inf:
            working = self._working()
            self._advance(self._next_event(working), working)
        self.compute = max(begin, job.end)
        self.exposed[job.lane] = self.exposed.get(job.lane, 0.0) + self.compute - begin
        if self._speeds.synchronous:
            self._host = self.compute

    def _working(self) -> list[str]:
        """Queues whose first job is under way now."""
        return [name for name, jobs in self._queues.items() if jobs and _start(jobs[0]) <= self._time + _RESOLUTION]

    def _rate(self, name: str, working: list[str]) -> float:
        if name in self._speeds.pairs:
            other, together = self._speeds.pairs[name]
            if other in working:
                return together
        return self._speeds.alone.get(name, 1.0)

    def _next_event(self, working: list[str]) -> float:
        """Seconds until a job begins or ends; infinity for never."""
        ends = [self._queues[name][0].left / self._rate(name, working) for name in working]
        begins = [_start(jobs[0]) - self._time for name, jobs in self._queues.items() if jobs and name not in working]
        return min([*ends, *begins], default=math.inf)

    def _simulate(self, until: float) -> None:
        """Have queues work up to a time, if it is not past."""
        while self._time < until:
            working = self._working()
            step = self._next_event(working)
            if self._time + step >= until:
                self._advance(until - self._time, working)
                self._time = until
            else:
                self._advance(step, working)

    def _advance(self, step: float, working: list[str]) -> None:
        """Have queues work for so many seconds, in which no job begins or ends before the last moment."""
        assert step < math.inf, "a job waits for what will never be over"
        rates = [self._rate(name, working) for name in working]
        for name, rate in zip(working, rates, strict=True):
            job = self._queues[name][0]
            if math.isnan(job.begin):
                job.begin = max(self._time, _start(job))
            ended = job.left / rate <= step + _RESOLUTION
            job.left -= step * rate
            if ended:
                self._queues[name].popleft()
                job.left, job.end = 0.0, self._time + step
                self.busy[job.lane] = self.busy.get(job.lane, 0.0) + job.end - job.begin
                self._draw(job.lane, job.begin, job.end, job.label)
        self._time += step

    def _draw(self, lane: str, begin: float, end: float, label: str) -> None:
        if not self._record or end - begin <= _RESOLUTION:
            return
        segments = self.segments.setdefault(lane, [])
        is_open = len(segments) > self._cut.get(lane, 0)
        if is_open and segments[-1][2] == label and abs(begin - segments[-1][1]) <= _RESOLUTION:
            segments[-1] = (segments[-1][0], end, label)
        else:
            segments.append((begin, end, label))


def _start(job: QueuedWork) -> float:
    """When a job may begin; infinity while nobody knows."""
    return job.ready if job.after is None else max(job.ready, job.after.end)
