"""Survey of this machine: everything that `trunkline tune` measures, and the profile made of it.

Under torchrun every rank measures at the same time, so that a link, a disk and host memory are shared while they are
measured, as they will be in training. Collectives are measured, too. The profile is rank 0's, with the speeds of host
memory and disks summed over its node.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist

from trunkline.attention import kernels
from trunkline.distributed import failure
from trunkline.plan import host_overhead, measurements
from trunkline.plan.hardware import Hardware, figure, points
from trunkline.plan.hardware.profile_schema import MemoryKind
from trunkline.utils.host_limits import memory_limit

_MIB = 2**20
MATMUL = (64, 256, 1_024, 4_096)
MEMORY = (2**16, 2**20, 8 * _MIB, 64 * _MIB, 512 * _MIB)
ATTENTION = ((256, 256), (1_024, 1_024), (4_096, 4_096), (1_024, 4_096), (1_024, 16_384), (4_096, 16_384))
_MOST_FLOPS = {"cpu": 3e10, "cuda": 1e14}  # of a product that is timed
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# A node's own, which its ranks divide among them; a profile has the node's.
_OF_A_NODE = ("host_bandwidth", "disk.read", "disk.write", "disk.both_read", "disk.both_write")


class MachineSurvey:
    """Measurements of a machine, one after another, and its profile.

    Args:
        device: device of this rank, which is measured.
        folder: folder on the disk that is measured.
        head_dims: head dims of attention to measure.

    Attributes:
        tasks: measurements by name, in the order to `run` them, the same on all ranks; each returns figures by dotted
            name, in the units of a profile.

    Raises:
        ValueError: `folder` cannot be written to, `head_dims` is empty, or no attention kernel has one of them.
    """

    def __init__(self, device: torch.device, folder: Path, head_dims: Sequence[int] = (64, 128)) -> None:
        if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise ValueError(f"disk='{folder}': give a folder that exists and can be written to.")
        if not head_dims or min(head_dims) < 1:
            raise ValueError(f"head_dims={list(head_dims)}: give head dims of models, such as 64,128.")
        for dim in head_dims:
            if kernels.resolve(device, _DTYPES["fp32" if device.type == "cpu" else "bf16"], dim, dim).name == "math":
                raise ValueError(
                    f"head_dims: no attention kernel of this PyTorch on {device.type} has head dim {dim}: leave it out "
                    "(`trunkline doctor` says which kernels there are)."
                )
        self._device, self._folder = device, folder
        self._local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if failure.in_job() else 1
        self._figures = self._sizes()
        self.tasks: dict[str, Callable[[], dict[str, Any]]] = dict(self._tasks(head_dims))

    def run(self, task: str) -> None:
        """Run one of `tasks` and keep its figures; under torchrun all ranks call this, and wait for each other."""
        if failure.in_job():
            dist.barrier()
        self._figures |= self._over_the_node({name: _rounded(value) for name, value in self.tasks[task]().items()})

    def profile(self) -> dict[str, Any]:
        """Return the profile as tables of figures, once all tasks have run; `to_toml` takes it.

        Its peak FLOP/s are those of the fastest matrix product.
        """
        today, by = date.today().isoformat(), f"trunkline tune with PyTorch {torch.__version__}"
        profile: dict[str, Any] = {
            "title": _title(self._device), "device_type": self._device.type, "attention": {"default": "torch"},
        }  # fmt: skip
        for name, value in self._figures.items():
            *parents, last = name.split(".")
            table = profile
            for parent in parents:
                table = table.setdefault(parent, {})
            table[last] = (points if isinstance(value, list) else figure)(value, f"measured by {by}", today)
        source = f"the fastest matrix product measured by {by}; no data sheet's"
        profile["peak"] = {
            dtype: figure(max(row[-1] for row in entry["points"]), source, today)
            for dtype, entry in profile["matmul"].items()
        }
        return profile

    def _sizes(self) -> dict[str, Any]:
        limit, on_cpu = memory_limit(), self._device.type == "cpu"
        host = min(psutil.virtual_memory().total, limit.limit if limit is not None else 2**62)
        if on_cpu:
            sizes = {"memory_bytes": host // self._local_ranks}
        else:  # ranks that share an uplink measure their share of it
            total = torch.cuda.get_device_properties(self._device).total_memory
            sizes = {"memory_bytes": total, "link.devices_per_uplink": 1}
        devices = self._local_ranks if failure.in_job() or on_cpu else torch.cuda.device_count()
        return {**sizes, "host_bytes": host, "devices_per_node": devices}

    def _tasks(self, head_dims: Sequence[int]) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
        device = self._device
        for name in _DTYPES:
            yield f"matrix products in {name}", partial(self._matmul, name)
        for kind in get_args(MemoryKind):
            yield f"memory ({kind})", partial(self._memory, kind)
        for name in _DTYPES:
            for dim in head_dims:
                yield f"attention in {name}, head dim {dim}", partial(self._attention, name, dim)
        if device.type == "cuda":
            yield "link", lambda: {f"link.{name}": rate for name, rate in measurements.link(device).items()}
        yield "disk", self._disk
        yield "host memory", lambda: {"host_bandwidth": measurements.memory(torch.device("cpu"), "copy", 256 * _MIB)}
        if failure.in_job() and dist.get_world_size() > 1:
            whole = "intra" if self._local_ranks == dist.get_world_size() else "inter"
            yield "collectives", partial(self._collectives, whole)
            if 1 < self._local_ranks < dist.get_world_size():
                yield "collectives within a node", partial(self._collectives, "intra", within=self._local_ranks)
        yield "least time of a kernel", lambda: {"kernel_seconds": measurements.kernel_seconds(device)}
        yield "host time of an operator", self._host_seconds

    def _matmul(self, name: str) -> dict[str, Any]:
        most = _MOST_FLOPS[self._device.type]
        sizes = [(m, n, k) for m in MATMUL for n in MATMUL for k in MATMUL if 2 * m * n * k <= most]
        return {f"matmul.{name}": [[*s, measurements.matmul(self._device, _DTYPES[name], *s)] for s in sizes]}

    def _memory(self, kind: str) -> dict[str, Any]:
        return {f"memory.{kind}": [[nbytes, measurements.memory(self._device, kind, nbytes)] for nbytes in MEMORY]}

    def _attention(self, name: str, dim: int) -> dict[str, Any]:
        device, dtype = self._device, _DTYPES[name]
        kernel = kernels.resolve(device, dtype, dim, dim)
        if kernel.compute_dtype(dtype) != dtype or kernel.name == "math":
            return {}  # attention is never computed in this dtype, or never by a kernel of its own
        rows: dict[str, list[list[float]]] = {"forward": [], "backward": []}
        for queries, keys in ATTENTION:
            for causal in (True, False) if queries == keys else (False,):
                rates = measurements.attention(device, kernel, dtype, dim, queries, keys, causal=causal)
                for direction, rate in zip(rows, rates, strict=True):
                    rows[direction].append([queries, keys, int(causal), rate])
        return {f"attention.torch.{direction}.{name}.{dim}": samples for direction, samples in rows.items()}

    def _disk(self) -> dict[str, Any]:
        """Measure the disk: on a CPU beside compute, whose cores the copies take; elsewhere alone."""
        on_cpu, a = self._device.type == "cpu", torch.randn(512, 512)
        work: Callable[[], Any] = partial(torch.mm, a, a) if on_cpu else partial(time.sleep, 0.01)
        mover = measurements.DiskMover(self._folder, 8 * _MIB)
        alone = mover.run((), work, 1.0)["work"]
        read, write, both = (mover.run(ways, work, 1.5) for ways in (("read",), ("write",), ("read", "write")))
        figures = {"disk.read": read["read"], "disk.write": write["write"], "disk.both_read": both["read"],
                   "disk.both_write": both["write"]}  # fmt: skip
        for lane, run in (("fetch", read), ("stash", write)) if on_cpu else ():
            figures[f"interference.{lane}"] = min(max(1 - run["work"] / alone, 0.0), 0.45)
        return figures

    def _collectives(self, scope: str, within: int | None = None) -> dict[str, Any]:
        group = dist.new_subgroups(within)[0] if within else dist.group.WORLD  # type: ignore[no-untyped-call]
        return {f"{scope}.{k}": v for k, v in measurements.collective(group, self._device, 32 * _MIB).items()}

    def _host_seconds(self) -> dict[str, float]:
        # The machine so far needs some host time to be a whole profile; the calibration replaces it.
        self._figures["host_seconds"] = 1.0
        so_far = Hardware.from_figures(self.profile())
        return {"host_seconds": host_overhead.host_seconds(so_far, self._device)}

    def _over_the_node(self, figures: dict[str, Any]) -> dict[str, Any]:
        """Return one rank's figures, with the sum over rank 0's node for everything that the node shares."""
        shared = {name: figures[name] for name in _OF_A_NODE if name in figures}
        if not shared or not failure.in_job():
            return figures
        by_rank: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, shared)
        return figures | {name: sum(rank[name] for rank in by_rank[: self._local_ranks]) for name in shared}


def _title(device: torch.device) -> str:
    if device.type == "cuda":
        return f"this machine: {torch.cuda.get_device_name(device)}"
    threads = torch.get_num_threads()
    return f"this machine: {platform.machine()} CPU, {threads} thread{'s' if threads > 1 else ''} a process"


def _rounded(value: Any) -> Any:
    """Round rates to four digits: no measurement is worth more."""
    if isinstance(value, list):
        return [[*row[:-1], _rounded(row[-1])] for row in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
