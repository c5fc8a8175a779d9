"""One training step over time: memory of each tier, work of each lane, and the time that compute waited.

A measured step and an estimated one give the same record, so that they can be drawn and compared with each other.
`timeline.json` of a run is this record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated, Literal, get_args

from pydantic import Field, TypeAdapter
from pydantic.dataclasses import dataclass

from trunkline.utils.json_records import Amount, Count, Real, read_json

Source = Literal["measured", "estimated"]
PhaseName = Literal["embed", "forward", "head", "backward", "optimizer"]
PHASES: tuple[str, ...] = get_args(PhaseName)
LANE_NAMES: tuple[str, ...] = ("compute", "fetch", "stash", "comm")

Segment = tuple[Real, Real, str]
StepFunction = list[tuple[Real, Count]]
Tier = Annotated[str, Field(pattern="^(device|host|disk)$")]
Lane = Annotated[str, Field(pattern=f"^({'|'.join(LANE_NAMES)})$")]


@dataclass(frozen=True)
class Phase:
    """One phase of a step, such as forward.

    Attributes:
        name: embed, forward, head, backward or optimizer. With several micro-batches each name comes several times.
        begin: Seconds since the step began.
        end: Seconds since the step began.
    """

    name: PhaseName
    begin: Real
    end: Real


@dataclass(frozen=True)
class Timeline:
    """One training step.

    Memory, lanes, `exposed` and `moved` are those of the first device; FLOPs and tokens are sums over all devices.

    Attributes:
        title: Title for people: model, tokens, chunk size, devices.
        source: "measured", or "estimated" on simulated hardware.
        seconds: Duration of the step.
        phases: Phases in order of their beginnings.
        memory: By tier (device, host, disk), a step function: (second, bytes held from then on). Parameters and
            everything else count.
        capacity: Bytes of each tier; None where no limit is known.
        holders: By tier, bytes of each kind of data at the tier's peak.
        lanes: By lane (compute, fetch, stash, comm), its work: (begin, end, label), in seconds.
        exposed: By lane, seconds that compute waited for it.
        moved: By lane, bytes.
        model_flops: FLOPs of the step, attention exactly causal, recomputation not counted; None if unknown.
        hardware_flops: FLOPs of the step, recomputation counted; None if unknown.
        peak_flops: FLOP/s of one device by its data sheet; None if unknown.
        tokens: Tokens of the step.
        devices: Number of devices.

    Raises:
        ValueError: A value has another type, is impossible for a step, or contradicts another one.
    """

    title: str
    source: Source
    seconds: Annotated[Real, Field(gt=0)]
    phases: list[Phase]
    memory: dict[Tier, StepFunction]
    capacity: dict[Tier, Count | None]
    holders: dict[Tier, dict[str, Count]]
    lanes: dict[Lane, list[Segment]]
    exposed: dict[Lane, Amount]
    moved: dict[Lane, Count]
    model_flops: Count | None
    hardware_flops: Count | None
    peak_flops: Annotated[Real, Field(gt=0)] | None
    tokens: Annotated[int, Field(ge=1)]
    devices: Annotated[int, Field(ge=1)]

    def __post_init__(self) -> None:
        # Sums of many floats may end a little after the step's own end.
        latest = self.seconds * (1 + 1e-6)
        spans = [(p.begin, p.end, f"phases[{i}] ({p.name})") for i, p in enumerate(self.phases)]
        for lane, segments in self.lanes.items():
            spans += [(begin, end, f"lanes.{lane}[{i}]") for i, (begin, end, _) in enumerate(segments)]
        for begin, end, what in spans:
            if not 0 <= begin <= end <= latest:
                raise ValueError(
                    f"{what} goes from second {begin!r} to {end!r}: it must end no earlier than it begins, and lie "
                    f"within the step, 0 to {self.seconds!r}."
                )
        for tier, steps in self.memory.items():
            before = 0.0
            for index, (second, _) in enumerate(steps):
                if not before <= second <= latest:
                    raise ValueError(
                        f"memory.{tier}[{index}] is at second {second!r}: seconds must rise from 0 to {self.seconds!r}."
                    )
                before = second

    def peak(self, tier: str) -> int | None:
        """Return the most bytes that a tier holds; None if its memory is unknown."""
        steps = self.memory.get(tier)
        return max(held for _, held in steps) if steps else None

    def busy(self, lane: str) -> float:
        """Return the seconds that a lane works; work that overlaps counts once."""
        return sum(end - begin for begin, end in disjoint(self.lanes.get(lane, [])))

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices per second."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, 0 to 1, recomputation not counted; None if unknown."""
        return self._utilization(self.model_flops)

    @property
    def mfu_recompute_counted(self) -> float | None:
        """Hardware FLOPs utilization, 0 to 1, recomputation counted; None if unknown."""
        return self._utilization(self.hardware_flops)

    def _utilization(self, flops: int | None) -> float | None:
        if flops is None or self.peak_flops is None:
            return None
        return flops / (self.seconds * self.peak_flops * self.devices)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return TypeAdapter(Timeline).dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read `to_json`'s text; unknown fields are ignored.

        Raises:
            ValueError: A field is missing or wrong; the message names it.
        """
        return read_json(cls, text)


def thinned(steps: Sequence[tuple[float, int]], end: float, most: int) -> StepFunction:
    """Reduce a step function to at most `most` changes, and keep its highest and lowest values.

    Time is cut into columns. The highest, the lowest and the last value of a column stay, each at its own second.

    Args:
        steps: (second, value) in order of seconds.
        end: Second at which the last column ends.
        most: Number of changes to keep, at least 3.
    """
    if len(steps) <= most or end <= 0:
        return list(steps)
    count = max(1, most // 3)
    kept: StepFunction = []
    for _, column in groupby(range(len(steps)), lambda i: min(count - 1, int(steps[i][0] / end * count))):
        indices = list(column)
        chosen = {max(indices, key=lambda i: steps[i][1]), min(indices, key=lambda i: steps[i][1]), indices[-1]}
        kept += [steps[i] for i in sorted(chosen)]
    return kept


def disjoint(segments: Iterable[Segment]) -> Iterator[tuple[float, float]]:
    """Yield (begin, end) of a lane's work in order, without the parts in which earlier work has not ended."""
    reached = 0.0
    for begin, end, _ in sorted(segments):
        if end > reached:
            yield max(begin, reached), end
            reached = end


def within(steps: Iterable[tuple[float, int]], end: float) -> StepFunction:
    """Return a step function whose seconds never fall and do not exceed `end`; rounding may have swapped some.

    A second is raised to the one before it, or lowered to `end`. No change is left out.
    """
    ordered: StepFunction = []
    reached = 0.0
    for second, value in steps:
        reached = min(max(reached, second), end)
        ordered.append((reached, value))
    return ordered


def clipped(lanes: Mapping[str, Iterable[Segment]], end: float) -> dict[str, list[Segment]]:
    """Return the part of each lane's work between seconds 0 and `end`, in order of beginnings."""
    return {
        lane: sorted((max(0.0, a), min(b, end), label) for a, b, label in segments if a < end and b > 0)
        for lane, segments in lanes.items()
    }
