"""What a run's folder holds of what a report can show. Whatever is absent is left out; nothing at all is an error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trunkline.report.curves import Curve, curves_of
from trunkline.report.evaluations import Found, evaluation_curves
from trunkline.report.history import Step, read_lines, read_step
from trunkline.report.timeline import Timeline
from trunkline.utils import json_fields

METRICS, EVALUATIONS, RECIPE = "metrics.jsonl", "evaluations.jsonl", "recipe.yaml"
TIMELINE, PLAN, BEFORE = "timeline.json", "plan.json", "before.json"

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """What `trunkline plan` predicted of a step.

    Attributes:
        hardware: what it was predicted for.
        seconds: of a step; None where nobody knew how fast the hardware is.
        tokens_per_second: over all devices.
        mfu: share of the peak, recomputation not counted.
        mfu_recompute_counted: with it.
        peaks: most bytes, by tier.
        exposed: seconds that compute waits, by lane.
        moved: bytes, by lane.
    """

    hardware: str
    seconds: float | None
    tokens_per_second: float | None
    mfu: float | None
    mfu_recompute_counted: float | None
    peaks: dict[str, int]
    exposed: dict[str, float]
    moved: dict[str, int]

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Read `plan.json`.

        Args:
            text: of the file; names that are not listed above are passed over.

        Raises:
            ValueError: something is missing or of another type.
        """
        record = json_fields.parse(text)

        def optional(name: str) -> float | None:
            return None if record.get(name) is None else json_fields.amount(record[name], name)

        def counts(name: str) -> dict[str, int]:
            return {
                k: json_fields.whole(n, f"{name}.{k}") for k, n in json_fields.mapping(record.get(name), name).items()
            }

        exposed = json_fields.mapping(record.get("exposed"), "exposed")
        return cls(
            hardware=json_fields.text(record.get("hardware", ""), "hardware"),
            seconds=optional("seconds"),
            tokens_per_second=optional("tokens_per_second"),
            mfu=optional("mfu"),
            mfu_recompute_counted=optional("mfu_recompute_counted"),
            peaks=counts("peaks"),
            exposed={lane: json_fields.amount(s, f"exposed.{lane}") for lane, s in exposed.items()},
            moved=counts("moved"),
        )


@dataclass(frozen=True)
class Run:
    """What was found.

    Attributes:
        name: of the folder.
        history: the steps, empty if unknown.
        evaluations: between them, empty if there were none.
        recipe: text of the recipe.
        timeline: one step over time.
        before: one step of the same model without chunks.
        plan: what was predicted.
    """

    name: str
    history: list[Step]
    evaluations: list[Found]
    recipe: str | None
    timeline: Timeline | None
    before: Timeline | None
    plan: Plan | None

    @property
    def title(self) -> str:
        """What the report is of."""
        return self.timeline.title if self.timeline else self.name

    @property
    def curves(self) -> list[Curve]:
        """Charts over the steps."""
        return [*curves_of(self.history, self.timeline), *evaluation_curves(self.evaluations)]


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Args:
        folder: it holds some of metrics.jsonl, evaluations.jsonl, recipe.yaml, timeline.json, plan.json, before.json.

    Raises:
        ValueError: there is no such folder, nothing of that is in it, or a file is not what its name says.
    """
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ValueError(f"'{folder}' {kind}: report takes the folder of a run, such as the output of trunkline train.")
    run = Run(
        name=folder.resolve().name,
        history=_read(folder / METRICS, lambda text: read_lines(text, read_step)) or [],
        evaluations=_read(folder / EVALUATIONS, lambda text: read_lines(text, Found.of)) or [],
        recipe=_read(folder / RECIPE, str),
        timeline=_read(folder / TIMELINE, Timeline.from_json),
        before=_read(folder / BEFORE, Timeline.from_json),
        plan=_read(folder / PLAN, Plan.from_json),
    )
    if not (run.history or run.timeline or run.before or run.plan):
        raise ValueError(
            f"'{folder}' has nothing to report: there is neither {METRICS} with a step in it (trunkline train writes "
            f"it), nor {TIMELINE}, {BEFORE} or {PLAN} (trunkline train and `trunkline plan --step` write them). Give "
            "the folder of a run."
        )
    return run


def _read(path: Path, read: Callable[[str], T]) -> T | None:
    if not path.is_file():
        return None
    try:
        return read(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(
            f"{path}: {error} Have the file written anew, or move it away: the report then leaves its part out."
        ) from error
