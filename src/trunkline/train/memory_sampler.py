"""How much memory the device holds, looked at through one step.

On a CPU the device's memory is the process's, and a thread reads it while operators run, which let go of the
interpreter. On CUDA PyTorch's allocator knows the most that was held since it was last asked, so that nothing is missed
between two looks.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Protocol

import torch

from trunkline.train.part_timer import Mark, PartTimer
from trunkline.train.step_metrics import peak_memory_bytes

EVERY = 0.025  # seconds between two looks at a process
_STATM = Path("/proc/self/statm")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class MemorySampler(Protocol):
    """Looks at memory.

    Attributes:
        points: what it saw, (mark, bytes), as a step function.
    """

    points: list[tuple[Mark, int]]

    def start(self) -> None:
        """The step begins."""

    def look(self) -> tuple[int, int]:
        """Bytes held now, and the most since the last look."""
        ...

    def stop(self) -> None:
        """The step is over, or has failed."""


class ProcessMemorySampler:
    """Resident memory of this process."""

    def __init__(self) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._most = 0
        self._statm = _STATM.open("rb", buffering=0) if _STATM.exists() else None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="trunkline-memory", daemon=True)

    def start(self) -> None:
        """See `MemorySampler.start`."""
        self.look()
        self._thread.start()

    def look(self) -> tuple[int, int]:
        """See `MemorySampler.look`."""
        held = self._see()
        most, self._most = max(held, self._most), held
        return held, most

    def stop(self) -> None:
        """See `MemorySampler.stop`."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._statm is not None:
            self._statm.close()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self._most = max(self._most, self._see())

    def _see(self) -> int:
        held = self._resident()
        self.points.append((time.perf_counter(), held))
        return held

    def _resident(self) -> int:
        if self._statm is None:  # the system tells only the most that it ever was
            return peak_memory_bytes(torch.device("cpu"))
        return int(os.pread(self._statm.fileno(), 64, 0).split()[1]) * _PAGE


class CudaMemorySampler:
    """What PyTorch's allocator has given out on a device.

    Between two looks the most that was held stands for all: when it was is not known.

    Args:
        device: which.
        clock: of the step; its marks need no synchronisation.
    """

    def __init__(self, device: torch.device, clock: PartTimer) -> None:
        self.points: list[tuple[Mark, int]] = []
        self._device, self._clock = device, clock
        self._last: Mark | None = None

    def start(self) -> None:
        """See `MemorySampler.start`."""
        self.look()

    def look(self) -> tuple[int, int]:
        """See `MemorySampler.look`."""
        counted = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
        torch.cuda.reset_peak_memory_stats(self._device)
        held, most, mark = counted["current"], counted["peak"], self._clock.now()
        if self._last is not None:
            self.points.append((self._last, most))
        self.points.append((mark, held))
        self._last = mark
        return held, most

    def stop(self) -> None:
        """See `MemorySampler.stop`."""


def memory_sampler_for(device: torch.device, clock: PartTimer) -> MemorySampler:
    """Return what looks at a device's memory."""
    return CudaMemorySampler(device, clock) if device.type == "cuda" else ProcessMemorySampler()


def total_bytes(device: torch.device) -> int:
    """Return the memory that a device has, on a CPU the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * _PAGE
