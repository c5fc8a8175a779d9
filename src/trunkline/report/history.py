"""The steps of a run, from `metrics.jsonl`: what the report needs of each, without loading torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, TypeVar

from trunkline.utils import json_fields

T = TypeVar("T")


@dataclass(frozen=True)
class Step:
    """What one step did; `trunkline.train.step_metrics.StepMetrics` says what each field is.

    Attributes:
        step: counted from 1.
        loss: nats a token.
        tokens: over all devices.
        seconds: of the whole step.
        model_flops: None if they could not be counted.
        peak_memory_bytes: of the first process.
        tiers: most bytes that the engine held, by tier.
        moved: bytes, by lane.
        exposed: seconds that compute waited, by lane.
    """

    step: int
    loss: float
    tokens: int
    seconds: float
    model_flops: int | None
    peak_memory_bytes: int
    tiers: dict[str, int]
    moved: dict[str, int]
    exposed: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Tokens of all devices over seconds."""
        return self.tokens / self.seconds


def read_lines(text: str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """Read a file of which each line is a record, such as `metrics.jsonl`.

    Args:
        text: of the file. A last line without its end is one that a run is just writing, and is passed over.
        read: makes something of a record.

    Returns:
        What was made of the lines, in order.

    Raises:
        ValueError: a line is no such record.
    """
    lines = text.split("\n")
    whole, _unfinished = lines[:-1], lines[-1]
    found = []
    for number, line in enumerate(whole, start=1):
        if line.strip():
            try:
                found.append(read(json_fields.parse(line)))
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from error
    return found


def read_step(record: dict[str, Any]) -> Step:
    """Read a line of `metrics.jsonl`.

    Raises:
        ValueError: it is not a step's.
    """

    def get(name: str) -> Any:
        return json_fields.member(record, name)

    seconds = sum(
        json_fields.amount(s, f"seconds.{part}") for part, s in json_fields.mapping(get("seconds"), "seconds").items()
    )
    if not seconds > 0:
        raise ValueError("seconds are 0 in all parts, and a step takes longer.")
    lanes = {
        lane: json_fields.mapping(of, f"lanes.{lane}")
        for lane, of in json_fields.mapping(get("lanes"), "lanes").items()
    }
    flops = get("model_flops")
    return Step(
        step=json_fields.whole(get("step"), "step"),
        loss=json_fields.number(get("loss"), "loss"),
        tokens=json_fields.whole(get("tokens"), "tokens"),
        seconds=seconds,
        model_flops=None if flops is None else json_fields.whole(flops, "model_flops"),
        peak_memory_bytes=json_fields.whole(get("peak_memory_bytes"), "peak_memory_bytes"),
        tiers={
            tier: json_fields.whole(n, f"tiers.{tier}")
            for tier, n in json_fields.mapping(get("tiers"), "tiers").items()
        },
        moved={
            lane: json_fields.whole(json_fields.member(of, "bytes", f"lanes.{lane}."), lane)
            for lane, of in lanes.items()
        },
        exposed={
            lane: json_fields.amount(json_fields.member(of, "exposed_seconds", f"lanes.{lane}."), lane)
            for lane, of in lanes.items()
        },
    )


def settled(steps: Sequence[Step]) -> Sequence[Step]:
    """Return the steps after the first, which compiles, allocates and warms up; the first where it is alone."""
    return steps[1:] or steps


def middle(values: Sequence[float | None]) -> float | None:
    """Return the median, None where a value is unknown or there is none."""
    known = [value for value in values if value is not None]
    return median(known) if known and len(known) == len(values) else None
