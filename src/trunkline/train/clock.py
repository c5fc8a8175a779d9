"""Where the seconds of a step go: one clock that is always in exactly one part.

On CUDA kernels run after their launch, so the clock records events at the changes and reads them once, when the step is
over; nothing in a sweep waits for it.
"""

from __future__ import annotations

import time

import torch

PARTS = ("data", "embed", "forward", "head", "backward", "optimizer")


class PartClock:
    """Sums the seconds of each part between `start` and `stop`.

    Args:
        device: Where the work runs; events are used on CUDA, `time.perf_counter` elsewhere.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def enter(self, part: str) -> None:
        """Say that what follows belongs to `part`; the same part again is free."""
        if not self._marks or self._marks[-1][0] != part:
            self._marks.append((part, self._now()))

    def stop(self) -> dict[str, float]:
        """End the step.

        Returns:
            Seconds of every part; they add up to the step's time.
        """
        self._marks.append(("", self._now()))
        if self._on_cuda:
            torch.cuda.synchronize()
        seconds = dict.fromkeys(PARTS, 0.0)
        for (part, begin), (_, end) in zip(self._marks, self._marks[1:], strict=False):
            seconds[part] += _between(begin, end)
        self._marks.clear()
        return seconds

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


def _between(begin: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event)
    assert isinstance(end, torch.cuda.Event)
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / 1e3
