"""Check of the link between host memory and a CUDA device: its speed each way, and both ways at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.cuda import Event, Stream

from trunkline.plan.checks.finding import Finding

_BYTES = 256 * 2**20  # a power of two, which is what pinned memory is rounded up to
_COPIES = 4
_SLOW = 10e9  # bytes a second; PCIe 3 with 16 lanes makes 12, 4 makes 25, 5 makes 54
_SHARED = 0.6  # of the speed alone; 0.7 on an A100 whose link is well, 0.4 in the bad case


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Speeds of a link, in bytes a second, with pinned memory.

    Attributes:
        fetch: into the device, alone.
        stash: out of it, alone.
        fetch_both: into it, while it goes out as well.
        stash_both: out of it, at the same time.
    """

    fetch: float
    stash: float
    fetch_both: float
    stash_both: float


def measure_link(device: torch.device, nbytes: int = _BYTES, copies: int = _COPIES) -> LinkSpeed:
    """Copy between pinned memory and a device, on two streams as the lanes do.

    Args:
        device: a CUDA device.
        nbytes: of each copy; two buffers of this size are taken on each side.
        copies: of each measurement.
    """
    fetch = (torch.empty(nbytes, dtype=torch.uint8, device=device), _pinned(nbytes))
    stash = (_pinned(nbytes), torch.empty(nbytes, dtype=torch.uint8, device=device))
    _seconds(device, [fetch, stash], 1)  # the first copy of a pair of buffers is slower
    (fetch_alone,), (stash_alone,) = _seconds(device, [fetch], copies), _seconds(device, [stash], copies)
    fetch_both, stash_both = _seconds(device, [fetch, stash], copies)
    moved = copies * nbytes
    return LinkSpeed(moved / fetch_alone, moved / stash_alone, moved / fetch_both, moved / stash_both)


def _pinned(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


def _seconds(device: torch.device, pairs: list[tuple[Tensor, Tensor]], copies: int) -> list[float]:
    """Seconds that the copies of each (target, source) take, all pairs at once, a stream each."""
    torch.cuda.synchronize(device)
    marks: list[tuple[Event, Event]] = []
    streams: list[Stream] = [Stream(device) for _ in pairs]  # type: ignore[no-untyped-call]
    for stream in streams:
        begin, end = (Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record(stream)
        marks.append((begin, end))
    for _ in range(copies):  # in turns, so that the second does not start when the first is nearly over
        for stream, (target, source) in zip(streams, pairs, strict=True):
            with torch.cuda.stream(stream):
                target.copy_(source, non_blocking=True)
    for stream, (_, end) in zip(streams, marks, strict=True):
        end.record(stream)
    torch.cuda.synchronize(device)
    return [begin.elapsed_time(end) / 1e3 for begin, end in marks]


def judge_link(name: str, speed: LinkSpeed) -> Finding:
    """What a speed means for training.

    Args:
        name: of the finding.
        speed: as it was measured.
    """
    text = (
        f"in {speed.fetch / 1e9:.1f} GB/s, out {speed.stash / 1e9:.1f} GB/s; at once {speed.fetch_both / 1e9:.1f} and "
        f"{speed.stash_both / 1e9:.1f}"
    )
    if min(speed.fetch, speed.stash) < _SLOW:
        return Finding(
            name,
            "warn",
            text,
            "Slower than PCIe 3 with 16 lanes: look at lanes and generation in nvidia-smi -q, and run on the "
            "processors near the device (numactl). Until then a larger chunk_size moves less for what it computes.",
        )
    if min(speed.fetch_both / speed.fetch, speed.stash_both / speed.stash) < _SHARED:
        return Finding(
            name,
            "warn",
            f"{text}: the directions take speed from each other",
            "Run on the processors near the device (numactl). Otherwise count on the speed at once: a larger "
            "chunk_size hides it.",
        )
    return Finding(name, "ok", text)


def link(device: torch.device) -> Finding:
    """How fast chunks move between host memory and a device.

    Args:
        device: a CUDA device, or a CPU, which has no link.
    """
    if device.type != "cuda":
        return Finding("link", "ok", "host memory is the device: chunks cross no link")
    return judge_link(f"link {device}", measure_link(device))
