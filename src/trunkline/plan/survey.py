"""All that `trunkline tune` measures, one thing after another: in a job, on every rank at the same time.

What ranks share (a link, a disk, host memory) is shared while it is measured, as it will be in training.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trunkline.attention import kernels
from trunkline.distributed import failure
from trunkline.plan import measure, overheads, tuning
from trunkline.plan.checks.cgroup import memory_limit
from trunkline.plan.hardware import Hardware, figure
from trunkline.plan.tuning import Task

# What a node has, which its ranks divide among them; in profiles these are the node's.
_OF_A_NODE = ("host_bandwidth", "disk.read", "disk.write", "disk.both_read", "disk.both_write")
_NODE_BYTES = 32 * 2**20


class Survey:
    """A machine being measured.

    Args:
        device: of this rank, whose speed it is.
        folder: of the disk that is to be measured.
        head_dims: of attention.

    Attributes:
        tasks: what there is to measure, in this order; all ranks have the same.

    Raises:
        ValueError: `folder` cannot be written to, or no attention kernel has one of the head dims.
    """

    def __init__(self, device: torch.device, folder: Path, head_dims: Sequence[int] = (64, 128)) -> None:
        _check(device, folder, head_dims)
        self._device = device
        self._figures: dict[str, Any] = _sizes(device)
        self.tasks = [
            *tuning.tasks(device, folder, head_dims),
            Task("least time of a kernel", lambda: {"kernel_seconds": overheads.kernel_seconds(device)}),
            *([Task("collectives within a node", lambda: _within_a_node(device))] if _spans_nodes() else []),
            Task("host time of an operator", self._host_seconds),
        ]

    def run(self, task: Task) -> None:
        """Measure something, when all ranks are ready to."""
        if failure.in_job():
            dist.barrier()
        self._figures |= _over_the_node({name: _rounded(value) for name, value in task.run().items()})

    def profile(self) -> dict[str, Any]:
        """The profile, once everything has been measured; `to_toml` takes it."""
        return self._profile(self._figures)

    def _profile(self, figures: dict[str, Any]) -> dict[str, Any]:
        found = tuning.profile(figures, self._device, tuning.title_of(self._device))
        version, today = torch.__version__, date.today().isoformat()
        source = f"the fastest matrix product that trunkline tune measured with PyTorch {version}; no data sheet's"
        found["peak"] = {
            dtype: figure(max(row[-1] for row in entry["points"]), source, today)
            for dtype, entry in found["matmul"].items()
        }
        return found

    def _host_seconds(self) -> dict[str, float]:
        so_far = Hardware.from_figures(self._profile({**self._figures, "host_seconds": 1.0}))  # which does not count
        return {"host_seconds": overheads.host_seconds(so_far, self._device)}


def _check(device: torch.device, folder: Path, head_dims: Sequence[int]) -> None:
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise ValueError(f"disk='{folder}': give a folder that exists and can be written to.")
    if not head_dims or min(head_dims) < 1:
        raise ValueError(f"head_dims={list(head_dims)}: give head dims of models, such as 64,128.")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    for dim in head_dims:
        if kernels.resolve(device, dtype, dim, dim).name == "math":
            raise ValueError(
                f"head_dims: no attention kernel of this PyTorch on {device.type} has head dim {dim}: leave it out "
                "(`trunkline doctor` says which kernels there are)."
            )


def _sizes(device: torch.device) -> dict[str, Any]:
    """What is no matter of speed, and what `tuning.profile` knows for one process only."""
    found: dict[str, Any] = {"host_bytes": _host_bytes()}
    if failure.in_job():
        found["devices_per_node"] = _local_ranks()
    if device.type == "cpu":
        found["memory_bytes"] = found["host_bytes"] // _local_ranks()
    else:
        found["link.devices_per_uplink"] = 1  # ranks that share one have measured their share of it
    return found


def _host_bytes() -> int:
    limit = memory_limit()
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return whole if limit is None else min(whole, limit.limit)


def _local_ranks() -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if failure.in_job() else 1


def _spans_nodes() -> bool:
    return failure.in_job() and 1 < _local_ranks() < dist.get_world_size()


def _within_a_node(device: torch.device) -> dict[str, float]:
    group, _ = dist.new_subgroups(_local_ranks())  # type: ignore[no-untyped-call]
    return {f"intra.{name}": value for name, value in measure.collective(group, device, _NODE_BYTES).items()}


def _over_the_node(figures: dict[str, Any]) -> dict[str, Any]:
    """Figures of one rank, with what the node has as the sum over the ranks of rank 0's node."""
    own = {name: figures[name] for name in _OF_A_NODE if name in figures}
    if not own or not failure.in_job():
        return figures
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return figures | {name: sum(each[name] for each in everyone[: _local_ranks()]) for name in own}


def _rounded(value: Any) -> Any:
    """Four digits: no measurement is worth more."""
    if isinstance(value, list):
        return [[*row[:-1], _rounded(row[-1])] for row in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value
