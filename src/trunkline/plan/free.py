"""What a machine has left: bytes of every tier that a process may take, and the profile of its device."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from trunkline.plan import own
from trunkline.plan.checks.cgroup import memory_limit
from trunkline.plan.hardware import Hardware, load

# What PyTorch calls the devices of bundled profiles; the first that is in the name counts.
_DEVICES = (
    ("A100-SXM4-40GB", "a100-40g"), ("A100-SXM4-80GB", "a100-80g"), ("H100 PCIe", "h100-pcie"), ("GH200", "gh200"),
    ("H100", "h100-sxm"), ("H200", "h200"), ("B200", "b200"), ("L40S", "l40s"), ("RTX 4090", "rtx-4090"),
    ("RTX 5090", "rtx-5090"), ("MI300X", "mi300x"),
)  # fmt: skip


def free_bytes(device: torch.device, processes: int, disk: str | None = None) -> dict[str, int]:
    """Bytes of each tier that one of several processes on this machine may take; on a CPU the host is the device.

    Args:
        device: of this process.
        processes: that share this machine's memory and disk.
        disk: folder of scratch files; None for no such tier.
    """
    memory = _available() // processes
    if device.type == "cuda":
        found = {"host": memory, "device": torch.cuda.mem_get_info(device)[0]}
    else:
        found = {"device": memory}
    if disk is not None:
        found["disk"] = shutil.disk_usage(disk).free // processes
    return found


def profile_of(device: torch.device) -> Hardware | None:
    """The profile of a device: this machine's own, where `trunkline tune` has written one, or a bundled one.

    None where there is none: a guess would be worse.
    """
    if own.path().exists():
        measured = load(own.NAME)
        if measured.device_type == device.type:
            return measured
    if device.type != "cuda":
        return None
    called = torch.cuda.get_device_name(device)
    return next((load(name) for part, name in _DEVICES if part in called), None)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _available(meminfo: Path = Path("/proc/meminfo")) -> int:
    """Bytes of memory that can be had without swapping, within the limits of a container."""
    lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    limit = memory_limit()
    return available if limit is None else min(available, limit.limit - limit.used)
