"""Samplers of device memory through one step.

On a CPU, device memory is the resident memory of the process, and a thread samples it while operators run (they release
the GIL). On CUDA, PyTorch's allocator counts the peak since the last sample, so that no peak is missed.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Protocol

import torch
from typing_extensions import override

from trunkline.train.part_timer import Mark, PartTimer
from trunkline.train.step_metrics import peak_memory_bytes

INTERVAL = 0.025  # seconds between two samples of a process
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemorySampler(Protocol):
    """Sampler of device memory.

    Attributes:
        points: samples (mark, bytes), a step function.
    """

    points: list[tuple[Mark, int]]

    def start(self) -> None:
        """Begin to sample."""

    def sample(self) -> tuple[int, int]:
        """Return the bytes held now, and the peak since the last sample."""
        ...

    def stop(self) -> None:
        """Stop sampling: the step has ended or failed."""


class ProcessMemorySampler(MemorySampler):
    """Sampler of this process's resident memory."""

    def __init__(self) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._most = 0
        self._statm = _STATM.open("rb", buffering=0) if _STATM.exists() else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trunkline-memory", daemon=True)

    @override
    def start(self) -> None:
        self.sample()
        self._thread.start()

    @override
    def sample(self) -> tuple[int, int]:
        held = self._sample_now()
        most, self._most = max(held, self._most), held
        return held, most

    @override
    def stop(self) -> None:
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._statm is not None:
            self._statm.close()

    def _run(self) -> None:
        while not self._over.wait(INTERVAL):
            self._most = max(self._most, self._sample_now())

    def _sample_now(self) -> int:
        held = self._resident()
        self.points.append((time.perf_counter(), held))
        return held

    def _resident(self) -> int:
        if self._statm is None:  # without /proc only the peak so far is known
            return peak_memory_bytes(torch.device("cpu"))
        return int(os.pread(self._statm.fileno(), 64, 0).split()[1]) * _PAGE


class CudaMemorySampler(MemorySampler):
    """Sampler of PyTorch's allocator on a CUDA device.

    The peak between two samples stands for the whole interval: its moment is unknown.

    Args:
        device: the device.
        clock: timer of the step; its marks need no synchronisation.
    """

    def __init__(self, device: torch.device, clock: PartTimer) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._device, self._clock = device, clock
        self._last: Mark | None = None

    @override
    def start(self) -> None:
        self.sample()

    @override
    def sample(self) -> tuple[int, int]:
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        held, most, mark = counted["current"], counted["peak"], self._clock.now()
        if self._last is not None:
            self.points.append((self._last, most))
        self.points.append((mark, held))
        self._last = mark
        return held, most

    @override
    def stop(self) -> None:
        pass


def memory_sampler_for(device: torch.device, clock: PartTimer) -> MemorySampler:
    """Return the sampler for a device."""
    return CudaMemorySampler(device, clock) if device.type == "cuda" else ProcessMemorySampler()


def total_bytes(device: torch.device) -> int:
    """Return the bytes of memory of a device; on a CPU, those of the machine."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * _PAGE
