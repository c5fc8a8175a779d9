"""Limits that a container or a batch system puts on this process: memory and processors, of cgroups v1 and v2.

A process sees all of the machine in `/proc/meminfo` and `os.cpu_count`, and is killed, or held up, at these limits.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

_NO_LIMIT = 2**60  # bytes; v1 writes the largest multiple of a page instead of "max"


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """A limit of memory.

    Attributes:
        limit: bytes that the group may hold.
        used: bytes that it holds, without the page cache that it would give up.
    """

    limit: int
    used: int


def memory_limit(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> MemoryLimit | None:
    """The limit under which least memory is left; None where there is none.

    Args:
        proc: where the kernel tells of processes.
        root: where the groups are mounted.
    """
    found = []
    for version, folder in _folders("memory", proc, root):
        limit_name, used_name, cache_name = {
            1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
            2: ("memory.max", "memory.current", "inactive_file"),
        }[version]
        limit = _number(folder / limit_name)
        if limit is None or limit >= _NO_LIMIT:
            continue
        used = _number(folder / used_name) or 0
        found.append(MemoryLimit(limit, max(0, used - _statistics(folder / "memory.stat").get(cache_name, 0))))
    return min(found, key=lambda x: x.limit - x.used, default=None)


def usable_processors(proc: Path = Path("/proc"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """How many processors this process can keep busy: those it may run on, or the quota of its group, if that is less.

    Args:
        proc: where the kernel tells of processes.
        root: where the groups are mounted.
    """
    affinity = getattr(os, "sched_getaffinity", None)
    counts = [len(affinity(0)) if affinity else os.cpu_count() or 1]
    for version, folder in _folders("cpu", proc, root):
        if version == 2:
            quota, _, period = _text(folder / "cpu.max").partition(" ")
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period):  # "max" and -1 are none
            counts.append(max(1, math.ceil(int(quota) / int(period))))
    return min(counts)


def _folders(controller: str, proc: Path, root: Path) -> Iterator[tuple[int, Path]]:
    """The folders of this process's groups, each with its version, up to the root.

    Inside a container the path that the kernel tells is often the host's; then the mounted root is the group itself.
    """
    for line in _text(proc / "self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            version, mounts = 2, [root, root / "unified"]
        elif controller in controllers.split(","):
            version, mounts = 1, [root / controller, root / controllers]
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for mount in mounts:
            for folder in (group, *group.parents):
                if ".." not in folder.parts and (mount / folder).is_dir():
                    yield version, mount / folder


def _text(path: Path) -> str:
    return path.read_text().strip() if path.is_file() else ""


def _number(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _statistics(path: Path) -> dict[str, int]:
    pairs = (line.split() for line in _text(path).splitlines())
    return {name: int(value) for name, value in pairs}
