"""Checks of host memory: how much there is, how much may be locked and shared, and how many files may be open."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from trunkline.plan.checks.cgroup import MemoryLimit
from trunkline.plan.checks.finding import Finding
from trunkline.units import format_bytes

_LITTLE = 4 * 2**30  # bytes; a model of 100M parameters with AdamW takes 1.6 GB, PyTorch itself half of one
_SHARED = 2**30  # bytes; Docker gives 64 MiB, of which NCCL takes about 10 for each pair of ranks
_OPEN_FILES = 1024  # the usual limit: enough for one machine, as long as nobody has lowered it


def host_memory(meminfo: Path = Path("/proc/meminfo"), limit: MemoryLimit | None = None) -> Finding:
    """How much host memory there is for what leaves the device, or for everything, on a CPU.

    Args:
        meminfo: the kernel's own account.
        limit: of this process's group; None for none.
    """
    sizes = _sizes(meminfo)
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    text = f"{format_bytes(available)} of {format_bytes(total)} available"
    if limit is not None and limit.limit < total:
        available = min(available, limit.limit - limit.used)
        text = (
            f"{format_bytes(max(0, available))} available, of {format_bytes(limit.limit)} that the container may hold "
            f"({format_bytes(total)} in the machine)"
        )
    if available >= _LITTLE:
        return Finding("host memory", "ok", text)
    return Finding(
        "host memory",
        "warn",
        text,
        "End other programs, or raise the container's limit (docker run --memory, the memory of the job): past it the "
        "process is killed without a message. A budget with disk keeps training below it.",
    )


def swap(meminfo: Path = Path("/proc/meminfo")) -> Finding:
    """Whether memory has already been moved to a swap disk.

    Args:
        meminfo: the kernel's own account.
    """
    sizes = _sizes(meminfo)
    total = sizes.get("SwapTotal", 0)
    used = total - sizes.get("SwapFree", 0)
    if not total:
        return Finding("swap", "ok", "none")
    text = f"{format_bytes(used)} of {format_bytes(total)} used"
    if used <= total / 10:
        return Finding("swap", "ok", text)
    return Finding(
        "swap",
        "warn",
        text,
        "Something has run out of memory here before: end other programs, and set device_budget or host_budget with "
        "disk, which moves chunks before they are needed, as swapping does not.",
    )


def lock_limit(cuda: bool, limit: int | None = None) -> Finding:
    """Whether host memory can be locked, as the slab is that chunks move to from a CUDA device.

    Args:
        cuda: training is on a CUDA device.
        limit: bytes (`resource.RLIM_INFINITY` for all); None asks the kernel.
    """
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if soft == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    text = f"at most {format_bytes(soft)}"
    if not cuda:
        return Finding("locked memory", "ok", f"{text}; on a CPU nothing is locked")
    return Finding(
        "locked memory",
        "warn",
        f"{text}, and the host slab (host_budget) is locked as a whole; InfiniBand locks its buffers, too",
        "ulimit -l unlimited (memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a service, "
        "docker run --ulimit memlock=-1).",
    )


def shared_memory(folder: Path = Path("/dev/shm")) -> Finding:
    """Whether processes have room to exchange data through shared memory, as NCCL and data loaders do.

    Args:
        folder: where it is mounted.
    """
    mend = "docker run --shm-size=16g or --ipc=host; in Kubernetes mount an emptyDir of medium Memory at /dev/shm."
    if not folder.is_dir():
        return Finding("shared memory", "warn", f"{folder} does not exist", mend)
    room = os.statvfs(folder)
    total, free = room.f_blocks * room.f_frsize, room.f_bavail * room.f_frsize
    text = f"{format_bytes(free)} of {format_bytes(total)} free in {folder}"
    if free >= _SHARED:
        return Finding("shared memory", "ok", text)
    mend = f"NCCL and the workers of data loaders die without it: {mend}"
    return Finding("shared memory", "warn", text, mend)


def open_files(limits: tuple[int, int] | None = None) -> Finding:
    """How many files and connections a process may have open.

    Args:
        limits: the soft and the hard one; None asks the kernel.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    text = f"at most {soft:,}"
    if soft >= _OPEN_FILES:
        return Finding("open files", "ok", text)
    highest = "" if hard == resource.RLIM_INFINITY or hard >= 65_536 else f" (this machine allows {hard:,})"
    return Finding(
        "open files",
        "warn",
        text,
        f"ulimit -n 65536{highest}: many ranks and the parts of a large model need more than {soft:,}.",
    )


def _sizes(meminfo: Path) -> dict[str, int]:
    """Bytes of each line that has them."""
    fields = (line.split() for line in meminfo.read_text().splitlines())
    return {field[0].rstrip(":"): int(field[1]) * 1024 for field in fields if len(field) == 3 and field[2] == "kB"}
