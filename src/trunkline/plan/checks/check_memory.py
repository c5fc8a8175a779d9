"""Checks of host memory: its size, limits on locked and shared memory, and on open files."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from trunkline.plan.checks import Finding
from trunkline.units import format_bytes
from trunkline.utils.host_limits import available_memory, memory_limit

SHARED = Path("/dev/shm")
_LITTLE = 4 * 2**30  # bytes; a model of 100M parameters with AdamW takes 1.6 GB, PyTorch itself half of one
_LITTLE_SHARED = 2**30  # bytes; Docker gives 64 MiB, of which NCCL takes about 10 for each pair of ranks
_OPEN_FILES = 1024  # the usual limit: enough for one machine, as long as nobody has lowered it


def check_host_memory() -> Finding:
    """Check that there is host memory for offloaded chunks, or on a CPU for everything."""
    total, available, limit = psutil.virtual_memory().total, available_memory(), memory_limit()
    text = f"{format_bytes(available)} of {format_bytes(total)} available"
    if limit is not None and limit.limit < total:
        text = (
            f"{format_bytes(available)} available, of {format_bytes(limit.limit)} that the container may hold "
            f"({format_bytes(total)} in the machine)"
        )
    fix = (
        "End other programs, or raise the container's limit (docker run --memory, the memory of the job): past it the "
        "process is killed without a message. A budget with offload_dir keeps training below it."
    )
    return _judge("host memory", text, available >= _LITTLE, fix)


def check_swap() -> Finding:
    """Check that little memory has been moved to swap."""
    swap = psutil.swap_memory()
    fix = (
        "Something has run out of memory here before: end other programs, and set device_budget or host_budget with "
        "offload_dir, which moves chunks before they are needed, as swapping does not."
    )
    text = f"{format_bytes(swap.used)} of {format_bytes(swap.total)} used" if swap.total else "none"
    return _judge("swap", text, swap.used <= swap.total / 10, fix)


def check_locked_memory(cuda: bool) -> Finding:
    """Check that host memory can be locked: the slab that chunks move to from a CUDA device is.

    Args:
        cuda: training is on a CUDA device.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    if not cuda:
        return Finding("locked memory", "ok", f"at most {format_bytes(limit)}; on a CPU nothing is locked")
    return Finding(
        "locked memory",
        "warn",
        f"at most {format_bytes(limit)}; the host slab (host_budget) is locked, and so are InfiniBand's buffers",
        "ulimit -l unlimited (memlock in /etc/security/limits.conf, LimitMEMLOCK=infinity of a service, "
        "docker run --ulimit memlock=-1).",
    )


def check_shared_memory() -> Finding:
    """Check that processes can exchange data through shared memory, as NCCL and data loaders do."""
    fix = (
        "NCCL and the workers of data loaders die without it: docker run --shm-size=16g or --ipc=host; in Kubernetes "
        "mount an emptyDir of medium Memory at /dev/shm."
    )
    if not SHARED.is_dir():
        return Finding("shared memory", "warn", f"{SHARED} does not exist", fix)
    room = psutil.disk_usage(str(SHARED))
    text = f"{format_bytes(room.free)} of {format_bytes(room.total)} free in {SHARED}"
    return _judge("shared memory", text, room.free >= _LITTLE_SHARED, fix)


def check_open_files() -> Finding:
    """Check how many files and connections a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    highest = "" if hard == resource.RLIM_INFINITY or hard >= 65_536 else f" (this machine allows {hard:,})"
    fix = f"ulimit -n 65536{highest}: many ranks and the parts of a large model need more than {soft:,}."
    return _judge("open files", f"at most {soft:,}", soft >= _OPEN_FILES, fix)


def _judge(name: str, found: str, well: bool, fix: str) -> Finding:
    return Finding(name, "ok", found) if well else Finding(name, "warn", found, fix)
