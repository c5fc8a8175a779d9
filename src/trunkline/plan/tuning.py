"""`trunkline tune`: this machine's profile, measured.

Under torchrun every rank measures at the same time, so that what they share is shared, and collectives are measured,
too; the profile is rank 0's.
"""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trunkline.attention import kernels
from trunkline.plan import measure
from trunkline.plan.hardware import Hardware, figure, points

_MIB = 2**20
MATMUL = (64, 256, 1_024, 4_096)
MOST_FLOPS = 3e10  # of a product that is timed on a CPU
MEMORY = (2**16, 2**20, 8 * _MIB, 64 * _MIB, 512 * _MIB)
ATTENTION = ((256, 256), (1_024, 1_024), (4_096, 4_096), (1_024, 4_096), (1_024, 16_384), (4_096, 16_384))
KINDS = ("copy", "pointwise", "transcendental", "reduction")
_BLOCK = 8 * _MIB


@dataclass(frozen=True, slots=True)
class Task:
    """One figure, or several that are measured together.

    Attributes:
        name: for the progress bar.
        run: measures, and gives them by their dotted name.
    """

    name: str
    run: Callable[[], dict[str, Any]]


def tasks(device: torch.device, folder: Path, head_dims: Sequence[int] = (64, 128)) -> list[Task]:
    """What there is to measure on a machine.

    Args:
        device: whose speed it is.
        folder: of the disk that is to be measured.
        head_dims: of attention.
    """
    return list(_tasks(device, folder, head_dims))


def profile(figures: dict[str, Any], device: torch.device, title: str) -> dict[str, Any]:
    """The figures of a profile, from what tasks gave."""
    on_cpu, source = device.type == "cpu", f"measured by trunkline tune with PyTorch {torch.__version__}"
    today = date.today().isoformat()
    found: dict[str, Any] = {"title": title, "device_type": device.type, "attention": {"default": "torch"}}
    everything = {
        "memory_bytes": _memory_bytes(device),
        "devices_per_node": _world() if on_cpu else torch.cuda.device_count(),
        "host_bytes": _host_bytes(),
        **figures,
    }
    for name, value in everything.items():
        *parents, last = name.split(".")
        table = found
        for parent in parents:
            table = table.setdefault(parent, {})
        table[last] = points(value, source, today) if isinstance(value, list) else figure(value, source, today)
    return found


def title_of(device: torch.device) -> str:
    """A machine's name for people."""
    if device.type == "cuda":
        return f"this machine: {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"this machine: {platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''} a process"


def default_folder() -> Path:
    """Where a disk is measured that nobody names."""
    return Path(tempfile.gettempdir())


def _tasks(device: torch.device, folder: Path, head_dims: Sequence[int]) -> Iterator[Task]:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    for name, dtype in dtypes.items():
        sizes = [(m, n, k) for m in MATMUL for n in MATMUL for k in MATMUL if 2 * m * n * k <= _most(device)]
        yield Task(f"matrix products in {name}", lambda dtype=dtype, sizes=sizes, name=name: {
            f"matmul.{name}": [[*size, measure.matmul(device, dtype, *size)] for size in sizes],
        })  # type: ignore[misc]  # fmt: skip
    for kind in KINDS:
        yield Task(f"memory ({kind})", lambda kind=kind: {
            f"memory.{kind}": [[n, measure.memory(device, kind, n)] for n in MEMORY],
        })  # type: ignore[misc]  # fmt: skip
    for name, dtype in dtypes.items():
        for dim in head_dims:
            yield Task(
                f"attention in {name}, head dim {dim}",
                lambda name=name, dtype=dtype, dim=dim: _attention(device, name, dtype, dim),  # type: ignore[misc]
            )
    if device.type == "cuda":
        yield Task("link", lambda: {f"link.{k}": v for k, v in measure.link(device, 256 * _MIB).items()})
    yield Task("disk", lambda: _disk(device, folder))
    yield Task("host memory", lambda: {"host_bandwidth": measure.memory(torch.device("cpu"), "copy", 256 * _MIB)})
    if _world() > 1:
        yield Task("collectives", lambda: _collectives(device))


def _most(device: torch.device) -> float:
    return MOST_FLOPS if device.type == "cpu" else 1e14


def _attention(device: torch.device, name: str, dtype: torch.dtype, dim: int) -> dict[str, Any]:
    kernel = kernels.resolve(device, dtype, dim, dim)
    if kernel.compute_dtype(dtype) != dtype or kernel.name == "math":
        return {}  # it is never computed in, or never by a kernel of its own
    rows: dict[str, list[list[float]]] = {"forward": [], "backward": []}
    for queries, keys in ATTENTION:
        for causal in (True, False) if queries == keys else (False,):
            rates = measure.attention(device, kernel, dtype, dim, queries, keys, causal=causal)
            for direction, rate in zip(rows, rates, strict=True):
                rows[direction].append([queries, keys, int(causal), rate])
    return {f"attention.torch.{direction}.{name}.{dim}": each for direction, each in rows.items()}


def _disk(device: torch.device, folder: Path) -> dict[str, Any]:
    """On a CPU beside compute, whose cores the copies take; elsewhere alone."""
    mover = measure.Mover(folder, _BLOCK)
    if device.type != "cpu":
        alone = {d: mover.run((d,), None, 1.0)[d] for d in ("read", "write")}
        both = mover.run(("read", "write"), None, 1.0)
        return {"disk.read": alone["read"], "disk.write": alone["write"], "disk.both_read": both["read"],
                "disk.both_write": both["write"]}  # fmt: skip
    a = torch.randn(512, 512)
    work = lambda: a @ a  # noqa: E731
    calm = mover.run((), work, 1.0)["work"]
    read, write = (mover.run((direction,), work, 1.5) for direction in ("read", "write"))
    both = mover.run(("read", "write"), work, 1.5)
    return {
        "disk.read": read["read"],
        "disk.write": write["write"],
        "disk.both_read": both["read"],
        "disk.both_write": both["write"],
        "interference.fetch": min(max(1 - read["work"] / calm, 0.0), 0.45),
        "interference.stash": min(max(1 - write["work"] / calm, 0.0), 0.45),
    }


def _collectives(device: torch.device) -> dict[str, Any]:
    found = measure.collective(dist.group.WORLD, device, 32 * _MIB)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) == _world()
    return {f"{'intra' if here else 'inter'}.{name}": value for name, value in found.items()}


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else _host_bytes()


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


__all__ = ["Hardware", "Task", "default_folder", "profile", "tasks", "title_of"]
