"""Settings of an evaluation, and the way people write lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from trunkline.evaluate.needle_samples import LongContextTask
from trunkline.evaluate.needles import TASKS
from trunkline.units import TOKEN_UNITS

# RULER (Hsieh et al., COLM 2024) calls a length effective while a model scores at least 85.6%, the score of Llama-2-7B
# at its own 4K.
DEFAULT_THRESHOLD = 0.85

_TUPLES: dict[str, tuple[type, str]] = {
    "tasks": (object, "tasks or their names, such as ('needle',)"),
    "lengths": (Integral, "whole numbers, such as (4096, 16384)"),
    "depths": (Real, "numbers, such as even_depths(11)"),
}


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of an evaluation.

    Attributes:
        lengths: lengths of the samples in tokens; with none no task is run.
        tasks: names from `TASKS`, or tasks with settings of their own.
        depths: depths of the answers in the haystack, from 0 to 1, at least one; every sample has all of them.
        samples: samples of each task and length.
        seed: seed of names, numbers and texts.
        threshold: least score of a length that counts as effective, above 0, at most 1.
        batch_size: samples of one forward of the scorer; answers are generated one sample at a time.
        bin_width: positions of one bin of perplexity by position; None for bins that double: 1, 2-3, 4-7, …

    Raises:
        ValueError: a setting is invalid.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str | LongContextTask, ...] = tuple(TASKS)
    depths: tuple[float, ...] = tuple(i / 10 for i in range(11))
    samples: int = 5
    seed: int = 0
    threshold: float = DEFAULT_THRESHOLD
    batch_size: int = 1
    bin_width: int | None = None

    def __post_init__(self) -> None:
        for name, (kind, example) in _TUPLES.items():
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(x, kind) for x in value):
                raise ValueError(f"{name}: {value!r}. Set a tuple of {example}.")
        unknown = [task for task in self.tasks if isinstance(task, str) and task not in TASKS]
        if unknown:
            raise ValueError(f"tasks: there is no '{unknown[0]}'. Set some of: {', '.join(TASKS)}.")
        names = [task.name for task in self.resolved_tasks]
        for name, values in (("tasks", names), ("lengths", self.lengths), ("depths", self.depths)):
            if len(set(values)) < len(values):
                raise ValueError(f"{name}: one is named twice ({', '.join(map(str, values))}). Name each once.")
        for name, is_valid, fix in (
            ("lengths", all(length >= 1 for length in self.lengths), "numbers of tokens above 0"),
            ("depths", self.depths and all(0 <= depth <= 1 for depth in self.depths), "at least one, from 0 to 1"),
            ("samples", self.samples >= 1, "1 or more"),
            ("batch_size", self.batch_size >= 1, "1 or more"),
            ("threshold", 0 < self.threshold <= 1, "a share of answers above 0, to 1 at most"),
            ("bin_width", self.bin_width is None or self.bin_width >= 1, "1 position or more, or None"),
        ):
            if not is_valid:
                raise ValueError(f"{name}: {getattr(self, name)!r} is out of range. Set {fix}.")

    @property
    def resolved_tasks(self) -> tuple[LongContextTask, ...]:
        """Tasks, with names replaced by the default task of that name."""
        return tuple(TASKS[task] if isinstance(task, str) else task for task in self.tasks)


def even_depths(count: int) -> tuple[float, ...]:
    """Return evenly spaced depths from 0 (beginning of the haystack) to 1 (end); a single one is 0.5."""
    return (0.5,) if count == 1 else tuple(i / (count - 1) for i in range(count))


def length_text(length: int) -> str:
    """Format a number of tokens: 4,096 is 4K, 1,048,576 is 1M, others stay whole."""
    for unit in ("M", "K"):
        if length % TOKEN_UNITS[unit] == 0:
            return f"{length // TOKEN_UNITS[unit]}{unit}"
    return f"{length:,}"
