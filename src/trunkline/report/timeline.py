"""One training step over time: what was held, what ran on which lane, and what compute waited for.

A rehearsal on virtual hardware and a measured step give the same record, so that they can be drawn, compared, and
laid over each other. This is the form in which it lies in a file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from trunkline.units import TIERS
from trunkline.utils import json_fields

Source = Literal["measured", "estimated"]
PhaseName = Literal["embed", "forward", "head", "backward", "optimizer"]
PHASES: tuple[str, ...] = get_args(PhaseName)
LANE_NAMES: tuple[str, ...] = ("compute", "fetch", "stash", "comm")

Segment = tuple[float, float, str]
StepFunction = list[tuple[float, int]]


@dataclass(frozen=True)
class Phase:
    """A part of the step.

    Attributes:
        name: embed, forward, head, backward or optimizer; with several micro-batches each comes several times.
        begin: seconds since the step began.
        end: likewise.
    """

    name: PhaseName
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """One step.

    Memory, lanes, `exposed` and `moved` are those of one device (the first), FLOPs and tokens those of all together.

    Attributes:
        title: what ran, for people: model, tokens, chunk, devices.
        source: whether it was measured, or rehearsed on virtual hardware.
        seconds: of the whole step.
        phases: parts of the step, in order of their beginnings.
        memory: by tier (device, host, disk), a step function: from this second on, so many bytes are held,
            parameters and all else counted.
        capacity: bytes of each tier; None where there is no limit that is known.
        holders: by tier, what holds how many bytes when the tier is fullest.
        lanes: by lane (compute, fetch, stash, comm), what it did: (begin, end, label).
        exposed: by lane, seconds that compute waited for it.
        moved: by lane, bytes.
        model_flops: of the step on all devices, attention exactly causal, recomputation not counted; None if unknown.
        hardware_flops: likewise, recomputation counted.
        peak_flops: FLOP/s that the maker states for one device; None if unknown.
        tokens: of the step, over all devices.
        devices: that took part.

    Raises:
        ValueError: values contradict each other, or are none that a step can have.
    """

    title: str
    source: Source
    seconds: float
    phases: list[Phase]
    memory: dict[str, StepFunction]
    capacity: dict[str, int | None]
    holders: dict[str, dict[str, int]]
    lanes: dict[str, list[Segment]]
    exposed: dict[str, float]
    moved: dict[str, int]
    model_flops: int | None
    hardware_flops: int | None
    peak_flops: float | None
    tokens: int
    devices: int

    def __post_init__(self) -> None:
        if self.source not in get_args(Source):
            raise ValueError(f"source is {self.source!r}, and must be one of {', '.join(get_args(Source))}.")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise ValueError(f"seconds is {self.seconds!r}, and must be a finite number above 0.")
        for name in ("tokens", "devices"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)!r}, and must be at least 1.")
        if self.peak_flops is not None and not self.peak_flops > 0:
            raise ValueError(f"peak_flops is {self.peak_flops!r}, and must be above 0, or null if it is not known.")
        for setting in ("memory", "capacity", "holders"):
            _known(getattr(self, setting), TIERS, setting)
        for setting in ("lanes", "exposed", "moved"):
            _known(getattr(self, setting), LANE_NAMES, setting)
        for index, phase in enumerate(self.phases):
            _known([phase.name], PHASES, f"phases[{index}]")
            self._within(phase.begin, phase.end, f"phases[{index}] ({phase.name})")
        for lane, segments in self.lanes.items():
            for index, (begin, end, _) in enumerate(segments):
                self._within(begin, end, f"lanes.{lane}[{index}]")
        for tier, steps in self.memory.items():
            before = 0.0
            for index, (second, _) in enumerate(steps):
                if not before <= second <= self._latest:
                    raise ValueError(
                        f"memory.{tier}[{index}] is at second {second!r}: seconds must rise from 0 to {self.seconds!r}."
                    )
                before = second

    @property
    def _latest(self) -> float:
        # Sums of many floats end a little beside the step's own end.
        return self.seconds * (1 + 1e-6)

    def _within(self, begin: float, end: float, what: str) -> None:
        if not 0 <= begin <= end <= self._latest:
            raise ValueError(
                f"{what} goes from second {begin!r} to {end!r}: it must end no earlier than it begins, and lie within "
                f"the step, 0 to {self.seconds!r}."
            )

    def peak(self, tier: str) -> int | None:
        """Return the most bytes that a tier holds; None where its memory is not known."""
        steps = self.memory.get(tier)
        return max(held for _, held in steps) if steps else None

    def busy(self, lane: str) -> float:
        """Return the seconds that a lane works; what overlaps counts once."""
        total, reached = 0.0, 0.0
        for begin, end, _ in sorted(self.lanes.get(lane, [])):
            total += max(0.0, end - max(begin, reached))
            reached = max(reached, end)
        return total

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices over seconds."""
        return self.tokens / self.seconds

    @property
    def mfu(self) -> float | None:
        """Share of the peak that model FLOPs make; None if either is unknown."""
        return self._utilisation(self.model_flops)

    @property
    def mfu_recompute_counted(self) -> float | None:
        """Share of the peak that FLOPs make with recomputation counted; None if either is unknown."""
        return self._utilisation(self.hardware_flops)

    def _utilisation(self, flops: int | None) -> float | None:
        if flops is None or self.peak_flops is None:
            return None
        return flops / (self.seconds * self.peak_flops * self.devices)

    def to_json(self) -> str:
        """Return the record as JSON text."""
        return json.dumps(asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Timeline:
        """Read what `to_json` wrote.

        Args:
            text: of the file; names that are not a timeline's are passed over.

        Raises:
            ValueError: something is missing, of another type, or no value that a step can have.
        """
        record = json_fields.parse(text)

        def get(name: str) -> Any:
            return json_fields.member(record, name)

        def by_name(name: str, read: Any) -> dict[str, Any]:
            return {key: read(value, f"{name}.{key}") for key, value in json_fields.mapping(get(name), name).items()}

        def optional(name: str, read: Any) -> Any:
            return None if record.get(name) is None else read(record[name], name)

        return cls(
            title=json_fields.text(get("title"), "title"),
            source=get("source"),
            seconds=json_fields.number(get("seconds"), "seconds"),
            phases=[
                _phase(value, f"phases[{i}]") for i, value in enumerate(json_fields.items(get("phases"), "phases"))
            ],
            memory=by_name("memory", _step_function),
            capacity=by_name("capacity", lambda value, what: None if value is None else json_fields.whole(value, what)),
            holders={
                tier: {what: json_fields.whole(n, f"holders.{tier}.{what}") for what, n in held.items()}
                for tier, held in by_name("holders", json_fields.mapping).items()
            },
            lanes=by_name("lanes", _segments),
            exposed=by_name("exposed", json_fields.amount),
            moved=by_name("moved", json_fields.whole),
            model_flops=optional("model_flops", json_fields.whole),
            hardware_flops=optional("hardware_flops", json_fields.whole),
            peak_flops=optional("peak_flops", json_fields.number),
            tokens=json_fields.whole(get("tokens"), "tokens"),
            devices=json_fields.whole(get("devices"), "devices"),
        )


def thinned(steps: Sequence[tuple[float, int]], end: float, most: int) -> StepFunction:
    """Leave out changes of a step function until at most `most` are left.

    Time is cut into columns; of each the highest, the lowest and the last value stay, each at its own second, so that
    no spike is lost.

    Args:
        steps: (second, value) in order of seconds.
        end: second at which the last column ends.
        most: changes to be left, at least 3.

    Returns:
        The changes that stay.
    """
    if len(steps) <= most or end <= 0:
        return list(steps)
    count = max(1, most // 3)
    kept: StepFunction = []
    first = 0
    while first < len(steps):
        column = min(count - 1, int(steps[first][0] / end * count))
        last = first
        while last + 1 < len(steps) and min(count - 1, int(steps[last + 1][0] / end * count)) == column:
            last += 1
        group = range(first, last + 1)
        chosen = {max(group, key=lambda i: steps[i][1]), min(group, key=lambda i: steps[i][1]), last}
        kept += [steps[i] for i in sorted(chosen)]
        first = last + 1
    return kept


def within(steps: Iterable[tuple[float, int]], end: float) -> StepFunction:
    """Return a step function with rising seconds, none beyond the end; what rounding has put out of order is mended."""
    found: StepFunction = []
    reached = 0.0
    for second, value in steps:
        reached = min(max(reached, second), end)
        found.append((reached, value))
    return found


def clipped(lanes: Mapping[str, Iterable[Segment]], end: float) -> dict[str, list[Segment]]:
    """Return what lanes did from 0 to `end`, each in order of beginnings."""
    return {
        lane: sorted((max(0.0, a), min(b, end), label) for a, b, label in segments if a < end and b > 0)
        for lane, segments in lanes.items()
    }


def _known(names: Any, known: tuple[str, ...], what: str) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{what} names {name!r}, and there are only {', '.join(known)}.")


def _phase(value: Any, what: str) -> Phase:
    record = json_fields.mapping(value, what)
    begin, end = (json_fields.number(json_fields.member(record, name, f"{what}."), f"{what}.{name}") for name in _ENDS)
    return Phase(json_fields.member(record, "name", f"{what}."), begin, end)


def _step_function(value: Any, what: str) -> StepFunction:
    pairs = [json_fields.items(pair, f"{what}[{i}]", 2) for i, pair in enumerate(json_fields.items(value, what))]
    return [
        (json_fields.number(at, f"{what}[{i}]"), json_fields.whole(n, f"{what}[{i}]"))
        for i, (at, n) in enumerate(pairs)
    ]


def _segments(value: Any, what: str) -> list[Segment]:
    found = []
    for index, triple in enumerate(json_fields.items(value, what)):
        place = f"{what}[{index}]"
        begin, end, label = json_fields.items(triple, place, 3)
        found.append((json_fields.number(begin, place), json_fields.number(end, place), json_fields.text(label, place)))
    return found


_ENDS = ("begin", "end")
