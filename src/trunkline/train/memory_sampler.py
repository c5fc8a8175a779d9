"""Samplers of device memory through one step.

On a CPU, device memory is the resident memory of the process, and a thread samples it while operators run (they release
the GIL). On CUDA, PyTorch's allocator counts the peak since the last sample, so that no peak is missed.
"""

from __future__ import annotations

import threading
import time

import psutil
import torch

from trunkline.train.part_timer import Mark, PartTimer

INTERVAL = 0.025  # seconds between two samples of a process


class ProcessMemorySampler:
    """Sampler of this process's resident memory.

    Attributes:
        points: samples (mark, bytes), a step function.
    """

    def __init__(self) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._most = 0
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trunkline-memory", daemon=True)

    def start(self) -> None:
        """Take the first sample, and start the thread."""
        self.sample()
        self._thread.start()

    def sample(self) -> tuple[int, int]:
        """Return the bytes held now, and the peak since the last sample."""
        held = self._sample_now()
        most, self._most = max(held, self._most), held
        return held, most

    def stop(self) -> None:
        """Stop sampling: the step has ended or failed."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            self._most = max(self._most, self._sample_now())

    def _sample_now(self) -> int:
        held: int = self._process.memory_info().rss
        self.points.append((time.perf_counter(), held))
        return held


class CudaMemorySampler:
    """Sampler of PyTorch's allocator on a CUDA device.

    The peak between two samples stands for the whole interval: its moment is unknown.

    Args:
        device: the device.
        clock: timer of the step; its marks need no synchronisation.

    Attributes:
        points: samples (mark, bytes), a step function.
    """

    def __init__(self, device: torch.device, clock: PartTimer) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._device, self._clock = device, clock
        self._last: Mark | None = None

    def start(self) -> None:
        """Take the first sample."""
        self.sample()

    def sample(self) -> tuple[int, int]:
        """Return the bytes allocated now, and the peak since the last sample; reset PyTorch's own peak."""
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        held, most, mark = counted["current"], counted["peak"], self._clock.now()
        if self._last is not None:
            self.points.append((self._last, most))
        self.points.append((mark, held))
        self._last = mark
        return held, most

    def stop(self) -> None:
        """Do nothing: no thread samples."""
