"""What an evaluation asks: tasks, lengths, depths, how many samples."""

from __future__ import annotations

from dataclasses import dataclass

from trunkline.evaluate.tasks import TASKS, Task

# RULER (Hsieh et al., COLM 2024) calls a length effective while a model scores at least what Llama-2-7B scores at its
# own 4K there, 85.6%.
DEFAULT_THRESHOLD = 0.85


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
