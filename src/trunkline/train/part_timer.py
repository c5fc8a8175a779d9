"""Timer of the parts of a step. It is in exactly one part at any time.

On CUDA, kernels run after their launch. So the timer records an event at each change of part and reads the events once,
after the step: nothing waits for them during a sweep.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

Mark = float | torch.cuda.Event  # a moment: second of `time.perf_counter`, or a CUDA event

PARTS = ("data", "embed", "forward", "head", "backward", "optimizer")


class PartTimer:
    """Timer of one step after another.

    Args:
        device: device of the work: CUDA is measured by events, anything else by `time.perf_counter`.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []
        self._last: list[tuple[str, Mark]] = []  # of the finished step

    def enter(self, part: str) -> None:
        """End the current part and begin another; without effect if it is the same."""
        if not self._marks or self._marks[-1][0] != part:
            self._marks.append((part, self.now()))

    def stop(self) -> dict[str, float]:
        """End the step; on CUDA this waits for all work of the device.

        Returns:
            Seconds of each of `PARTS`, 0 for one that was not entered; their sum is the time of the step.
        """
        self._marks.append(("", self.now()))
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in pairwise(self._marks):
            seconds[part] += _between(begin, end)
        self._last, self._marks = self._marks, []
        return seconds

    def drop(self) -> None:
        """Drop parts entered since the last step: they belong to no step."""
        self._marks = []

    def spans(self) -> list[tuple[str, float, float]]:
        """Return the parts of the finished step: name, begin and end, in seconds since the step began."""
        at = [self.since_begin(mark) for _, mark in self._last]
        return [(part, begin, end) for (part, _), (begin, end) in zip(self._last, pairwise(at), strict=False)]

    def since_begin(self, mark: Mark) -> float:
        """Return the seconds from the beginning of the finished step to a mark made in it."""
        return _between(self._last[0][1], mark)

    @property
    def begin(self) -> Mark:
        """Beginning of the running step."""
        return self._marks[0][1]

    def now(self) -> Mark:
        """Return a mark of this moment; on CUDA, of the end of all work launched so far."""
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(begin: Mark, end: Mark) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
