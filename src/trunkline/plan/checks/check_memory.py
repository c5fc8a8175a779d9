"""Checks of host memory: its size, limits on locked and shared memory, and on open files."""

from __future__ import annotations

import resource
from pathlib import Path

import psutil

from trunkline.plan.checks import Finding, judge
from trunkline.units import format_bytes
from trunkline.utils.host_limits import available_memory, memory_limit

SHARED = Path("/dev/shm")
_LITTLE = 4 * 2**30  # bytes; a model of 100M parameters with AdamW takes 1.6 GB, PyTorch itself half of one
_LITTLE_SHARED = 2**30  # bytes; Docker gives 64 MiB, of which NCCL takes about 10 for each pair of ranks
_OPEN_FILES = 1024  # the usual limit: enough for one machine, as long as nobody has lowered it


def check_host_memory() -> Finding:
    """Check the available host memory, within the container's limit; warn below 4 GiB."""
    total, available, limit = psutil.virtual_memory().total, available_memory(), memory_limit()
    text = f"{format_bytes(available)} of {format_bytes(total)} available"
    if limit is not None and limit.limit < total:
        text = (
            f"{format_bytes(available)} available, of {format_bytes(limit.limit)} that the container may hold "
            f"({format_bytes(total)} in the machine)"
        )
    fix = (
        "End other programs, or raise the limit (docker run --memory): past it the process is killed without a message."
    )
    return judge("host memory", text, fix if available < _LITTLE else None)


def check_swap() -> Finding:
    """Check how much memory has been moved to swap; warn if more than a tenth of its space is used."""
    swap = psutil.swap_memory()
    fix = "End other programs, or set budgets and offload_dir: chunks are prefetched, and swapped memory is not."
    text = f"{format_bytes(swap.used)} of {format_bytes(swap.total)} used" if swap.total else "none"
    return judge("swap", text, fix if swap.used > swap.total / 10 else None)


def check_locked_memory(cuda: bool) -> Finding:
    """Check the limit on locked host memory; with a CUDA device any limit is a warning.

    The host slab that chunks of a CUDA device move to is locked.

    Args:
        cuda: training is on a CUDA device.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("locked memory", "ok", "no limit")
    locked = "the host slab (host_budget) is locked, and so are InfiniBand's buffers" if cuda else "a CPU locks nothing"
    fix = (
        "ulimit -l unlimited (memlock in limits.conf, LimitMEMLOCK=infinity of a service, docker --ulimit memlock=-1)."
    )
    return judge("locked memory", f"at most {format_bytes(limit)}; {locked}", fix if cuda else None)


def check_shared_memory() -> Finding:
    """Check the shared memory through which NCCL and data loaders exchange data; warn below 1 GiB free."""
    fix = "NCCL and data loaders die without it: docker run --shm-size=16g; in Kubernetes an emptyDir of medium Memory."
    if not SHARED.is_dir():
        return Finding("shared memory", "warn", f"{SHARED} does not exist", fix)
    room = psutil.disk_usage(str(SHARED))
    text = f"{format_bytes(room.free)} of {format_bytes(room.total)} free in {SHARED}"
    return judge("shared memory", text, fix if room.free < _LITTLE_SHARED else None)


def check_open_files() -> Finding:
    """Check how many files and connections a process may have open; warn below 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    highest = "" if hard == resource.RLIM_INFINITY or hard >= 65_536 else f" (this machine allows {hard:,})"
    fix = f"ulimit -n 65536{highest}: many ranks and the parts of a large model need more than {soft:,}."
    return judge("open files", f"at most {soft:,}", fix if soft < _OPEN_FILES else None)
