"""Memory, disk and processors that this process may use: the machine's, within the limits of its cgroups (v1 and v2).

A process sees the whole machine in `/proc/meminfo` and `os.cpu_count`; a container or batch system kills it, or slows
it down, at lower limits. psutil does not read them.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    import torch  # only where it is used: `trunkline doctor` needs these limits even where PyTorch is broken

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # bytes; v1 writes the largest multiple of a page instead of "max"
_MEMORY_FILES = {
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A cgroup's limit of memory, in bytes.

    Attributes:
        limit: most bytes of the group.
        used: bytes that it holds, without the page cache that it would give up.
    """

    limit: int
    used: int


def memory_limit() -> MemoryLimit | None:
    """Return the cgroup limit under which least memory is left; None without a limit."""
    limits = []
    for version, folder in _cgroups("memory"):
        limit_file, used_file, cache_name = _MEMORY_FILES[version]
        limit = _text(folder / limit_file)
        if limit.isdigit() and int(limit) < _NO_LIMIT:
            cache = dict(line.split() for line in _text(folder / "memory.stat").splitlines()).get(cache_name, 0)
            limits.append(MemoryLimit(int(limit), max(0, int(_text(folder / used_file) or 0) - int(cache))))
    return min(limits, key=lambda x: x.limit - x.used, default=None)


def usable_processors() -> int:
    """Return how many processors this process can keep busy: its affinity, or a cgroup's quota if that is less."""
    counts = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for version, folder in _cgroups("cpu"):
        files = ("cpu.max",) if version == 2 else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        quota, _, period = " ".join(_text(folder / name) for name in files).partition(" ")
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are no quota
            counts.append(max(1, math.ceil(int(quota) / int(period))))
    return min(counts)


def available_memory() -> int:
    """Return the bytes of host memory that are free without swapping, within the tightest cgroup limit."""
    available, limit = psutil.virtual_memory().available, memory_limit()
    return available if limit is None else max(0, min(available, limit.limit - limit.used))


def free_bytes(device: torch.device, processes: int, disk: str | None = None) -> dict[str, int]:
    """Return the bytes of each tier that are free now for one of several processes on this machine.

    Host memory and disk are divided evenly by the processes. A CUDA device's memory is not: each process has its own.
    On a CPU, host memory is the device, and there is no host tier.

    Args:
        device: device of this process.
        processes: number of processes that share this machine's memory and disk.
        disk: folder of scratch files; None for no such tier.
    """
    memory = available_memory() // processes
    tiers = {"device": memory}
    if device.type == "cuda":
        import torch

        tiers = {"host": memory, "device": torch.cuda.mem_get_info(device)[0]}
    if disk is not None:
        tiers["disk"] = shutil.disk_usage(disk).free // processes
    return tiers


def _cgroups(controller: str) -> Iterator[tuple[int, Path]]:
    """Yield the version and folder of each of this process's cgroups, up to the root.

    Inside a container the kernel often tells the host's path; then the mounted root is the group itself.
    """
    for line in _text(PROC / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mounts = 2, [CGROUPS, CGROUPS / "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [CGROUPS / controller, CGROUPS / controllers]
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (group, *group.parents):
                if ".." not in folder.parts and (mount / folder).is_dir():
                    yield version, mount / folder


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""
