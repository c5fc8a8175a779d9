"""What an evaluation asks: tasks, lengths, depths, how many samples; and how people write these."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

from trunkline.evaluate.tasks import TASKS, Task

# RULER (Hsieh et al., COLM 2024) calls a length effective while a model scores at least what Llama-2-7B scores at its
# own 4K there, 85.6%.
DEFAULT_THRESHOLD = 0.85

_UNITS = {"": 1, "K": 2**10, "M": 2**20}


@dataclass(frozen=True)
class EvaluateSettings:
    """Settings of an evaluation.

    Attributes:
        lengths: tokens of the samples; at least one.
        tasks: names out of `trunkline.evaluate.tasks.TASKS`, or tasks with settings of their own.
        depths: where answers stand in the haystack, from 0 to 1: all of them in every sample.
        samples: how many of each task and length.
        seed: another one makes other names, numbers and texts.
        threshold: least score of a length that counts as effective, 0 to 1.
        batch_size: samples of one forward.
        bin_width: positions of one bin of perplexity by position; None for bins that double: 1, 2-3, 4-7, …

    Raises:
        ValueError: a setting has a value that nothing can be done with.
    """

    lengths: tuple[int, ...]
    tasks: tuple[str | Task, ...] = tuple(TASKS)
    depths: tuple[float, ...] = tuple(i / 10 for i in range(11))
    samples: int = 5
    seed: int = 0
    threshold: float = DEFAULT_THRESHOLD
    batch_size: int = 1
    bin_width: int | None = None

    def __post_init__(self) -> None:
        wanted: list[tuple[str, object, type, str]] = [
            ("tasks", self.tasks, object, "tasks or their names, such as ('needle',)"),
            ("lengths", self.lengths, Integral, "whole numbers, such as (4096, 16384)"),
            ("depths", self.depths, Real, "numbers, such as even_depths(11)"),
        ]
        for setting, given, kind, several in wanted:
            if isinstance(given, str) or not isinstance(given, Sequence) or not all(isinstance(x, kind) for x in given):
                raise ValueError(f"{setting}: {given!r}. Set a tuple of {several}.")
        unknown = [task for task in self.tasks if isinstance(task, str) and task not in TASKS]
        if unknown:
            raise ValueError(f"tasks: there is no '{unknown[0]}'. Set some of: {', '.join(TASKS)}.")
        names = [task.name for task in self.resolved_tasks]
        for setting, values in (("tasks", names), ("lengths", self.lengths), ("depths", self.depths)):
            if len(set(values)) < len(values):
                raise ValueError(f"{setting}: one is named twice ({', '.join(map(str, values))}). Name each once.")
        if any(length < 1 for length in self.lengths):
            raise ValueError(f"lengths: {min(self.lengths)} is no number of tokens. Set lengths above 0.")
        if not all(0 <= depth <= 1 for depth in self.depths) or not self.depths:
            raise ValueError(f"depths: {list(self.depths)}; each is a share of the haystack. Set at least one, 0 to 1.")
        for setting, value in (("samples", self.samples), ("batch_size", self.batch_size)):
            if value < 1:
                raise ValueError(f"{setting}: {value} is too few. Set 1 or more.")
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold} is no share of answers. Set it above 0, to 1 at most.")
        if self.bin_width is not None and self.bin_width < 1:
            raise ValueError(f"bin_width: {self.bin_width} is too few. Set 1 position or more, or None.")

    @property
    def resolved_tasks(self) -> tuple[Task, ...]:
        """The tasks, those given by name as they are by default."""
        return tuple(TASKS[task] if isinstance(task, str) else task for task in self.tasks)


def even_depths(count: int) -> tuple[float, ...]:
    """Return depths that are evenly far from each other.

    Args:
        count: how many, at least 1; one alone is the middle.

    Returns:
        From 0, the beginning of the haystack, to 1, its end.
    """
    return (0.5,) if count == 1 else tuple(i / (count - 1) for i in range(count))


def parse_length(text: int | str) -> int:
    """Read a number of tokens as people write it.

    Args:
        text: a number, or one with K (1,024) or M (1,048,576) behind it: "16K", "1.5M", "32_768".

    Returns:
        Tokens.

    Raises:
        ValueError: it is no whole number of tokens above 0.
    """
    found = re.fullmatch(r"(\d[\d_,]*(?:\.\d+)?)\s*([KM]?)", str(text).strip().upper())
    tokens = 0.0 if found is None else float(re.sub("[_,]", "", found[1])) * _UNITS[found[2]]
    if isinstance(text, bool) or tokens < 1 or tokens != int(tokens):
        raise ValueError(f"{text!r} is no number of tokens; write 4096, 4K or 1M")
    return int(tokens)
