"""Where the seconds of a step go: one clock that is always in exactly one part.

On CUDA kernels run after their launch, so the clock records events at the changes and reads them once, when the step is
over; nothing in a sweep waits for it.
"""

from __future__ import annotations

import time
from itertools import pairwise

import torch

Mark = float | torch.cuda.Event  # a moment: of `time.perf_counter`, or of the device

PARTS = ("data", "embed", "forward", "head", "backward", "optimizer")


class PartTimer:
    """Sums the seconds of each part between `start` and `stop`.

    Args:
        device: Where the work runs; events are used on CUDA, `time.perf_counter` elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, Mark]] = []
        self._last: list[tuple[str, Mark]] = []  # those of the step that is over

    def enter(self, part: str) -> None:
        """Say that what follows belongs to `part`; the same part again is free."""
        if not self._marks or self._marks[-1][0] != part:
            self._marks.append((part, self.now()))

    def stop(self) -> dict[str, float]:
        """End the step.

        Returns:
            Seconds of every part; they add up to the step's time.
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
        """Forget what has been entered since the last step: it belongs to none."""
        self._marks = []

    def spans(self) -> list[tuple[str, float, float]]:
        """The parts of the step that is over: name, begin and end in seconds since the step began."""
        at = [self.since_begin(mark) for _, mark in self._last]
        return [(part, begin, end) for (part, _), (begin, end) in zip(self._last, pairwise(at), strict=False)]

    def since_begin(self, mark: Mark) -> float:
        """Seconds from the beginning of the step that is over to a mark that `now` gave in it."""
        return _between(self._last[0][1], mark)

    @property
    def begin(self) -> Mark:
        """The beginning of the step that is under way."""
        return self._marks[0][1]

    def now(self) -> Mark:
        """A mark at this moment of the work that the device has been given."""
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
