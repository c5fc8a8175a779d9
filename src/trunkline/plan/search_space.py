"""What a plan chooses between: meshes, chunk sizes, what is kept; and the room that a choice has on a machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from trunkline.distributed.mesh import ParallelDims, divisors
from trunkline.plan.hardware import Hardware
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.simulated_sharding import ShardingSpec

# What nobody here accounts for: a CUDA context, workspaces of libraries, buffers of NCCL; and blocks that an allocator
# cannot use.
_CONTEXT = 3 * 2**29
_UNUSABLE = 0.04
# Of host memory, for everything else that runs there, page cache and Python itself.
_HOST_REST = 0.1
_CHUNKS = {"cuda": tuple(2**n for n in range(12, 19)), "cpu": tuple(2**n for n in range(9, 14))}
MOST_CHUNKS = 128  # of a sequence: more only make a step slower


@dataclass(frozen=True, slots=True)
class Cluster:
    """What a plan is for.

    Attributes:
        hardware: of its nodes.
        devices: in all.
        host_bytes: memory of a node.
        disk_bytes: of a node's scratch disks; 0 for none.
    """

    hardware: Hardware
    devices: int
    host_bytes: int
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no machine.

        Raises:
            ValueError: with the setting and the mend.
        """
        if not isinstance(self.devices, int) or isinstance(self.devices, bool) or self.devices < 1:
            raise ValueError(f"gpus={self.devices!r}: give a positive whole number of devices.")
        if self.host_bytes <= 0:
            raise ValueError(f"host_memory={self.host_bytes!r}: give the memory of a node, such as '1TiB'.")
        if self.disk_bytes < 0:
            raise ValueError(f"disk={self.disk_bytes!r}: give the bytes of a node's scratch disks, or 0 for none.")

    @property
    def devices_per_node_used(self) -> int:
        """Devices of a node that work."""
        return min(self.devices, self.hardware.devices_per_node)

    @property
    def usable_device_bytes(self) -> int:
        """Bytes of a device that can be used."""
        whole = self.hardware.memory_bytes
        if self.hardware.link is None:  # host memory is the device
            return int(min(whole, self.host_bytes) * (1 - _HOST_REST)) // self.devices_per_node_used
        return int(whole * (1 - _UNUSABLE)) - _CONTEXT

    @property
    def usable_host_bytes(self) -> int:
        """Bytes of host memory that the rank of one device can use; 0 where it is the device."""
        return (
            0 if self.hardware.link is None else int(self.host_bytes * (1 - _HOST_REST)) // self.devices_per_node_used
        )

    @property
    def usable_disk_bytes(self) -> int:
        """Bytes of disk that the rank of one device can use."""
        return self.disk_bytes // self.devices_per_node_used


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """What is to be trained.

    Attributes:
        context: tokens of a row (global).
        batch_size: rows of a micro-batch (global).
        optimizer: whose state is held; None for none.
        fixed: settings of `trunkline.stream` that are given, and not chosen; budgets among them are the most that a
            choice may take.
        parallel_dims: of the mesh, where it is given.
        sharding_spec: of parameters, where it is given.
        micro_batches: of a step.
    """

    context: int
    batch_size: int = 1
    optimizer: AdamWSpec | None = field(default_factory=AdamWSpec)
    fixed: dict[str, Any] = field(default_factory=dict)
    parallel_dims: ParallelDims | None = None
    sharding_spec: ShardingSpec | None = None
    micro_batches: int = 1


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to do it.

    Attributes:
        parallel_dims: of the mesh.
        sharding_spec: of parameters over it.
        chunk_size: tokens of a chunk (global).
        keep: what stays between forward and backward.
        checkpoint_every: only the input of every N-th layer stays.
    """

    parallel_dims: ParallelDims
    sharding_spec: ShardingSpec
    chunk_size: int
    keep: tuple[str, ...] = ("attention",)
    checkpoint_every: int = 1

    @property
    def settings(self) -> dict[str, Any]:
        """Those of `trunkline.stream`, without budgets."""
        return {"chunk_size": self.chunk_size, "keep": self.keep, "checkpoint_every": self.checkpoint_every}

    def __str__(self) -> str:
        """For people."""
        keep_options = f"keep [{', '.join(self.keep)}]"
        every = f", checkpoint_every {self.checkpoint_every}" if self.checkpoint_every > 1 else ""
        mesh = "" if self.parallel_dims == ParallelDims() else f", {self.parallel_dims}, zero {self.sharding_spec.zero}"
        offload = ", offload" if self.sharding_spec.offload else ""
        return f"chunk {self.chunk_size:,}, {keep_options}{every}{mesh}{offload}"


def meshes(job: TrainingJob, cluster: Cluster, num_heads: int, *, one_sequence: bool = False) -> Iterator[ParallelDims]:
    """Meshes of all devices, those with most replicas first: replicas exchange least.

    Args:
        job: whose batch the replicas share.
        cluster: whose devices they are.
        num_heads: query heads.
        one_sequence: only those whose devices all share one sequence.
    """
    if job.parallel_dims is not None:
        yield job.parallel_dims
        return
    replicas = [1] if one_sequence else divisors(math.gcd(cluster.devices, job.batch_size))[::-1]
    for dp in replicas:
        share = cluster.devices // dp
        sp = max(n for n in divisors(share) if num_heads % n == 0)
        yield ParallelDims(dp=dp, sp=sp, cp=share // sp)


def sharding_specs(job: TrainingJob, parallel_dims: ParallelDims) -> Iterator[ShardingSpec]:
    """Ways to spread parameters, the fastest first."""
    if job.sharding_spec is not None:
        yield job.sharding_spec
        return
    # As `trunkline train` does it: parts are the float32 masters.
    dtype = torch.float32 if job.optimizer is not None and job.optimizer.fp32_master else None
    if parallel_dims.dp * parallel_dims.sp * parallel_dims.cp == 1:
        yield ShardingSpec(zero=0)
    else:
        for zero in (2, 3):
            yield ShardingSpec(zero=zero, dtype=dtype)
    yield ShardingSpec(zero=3, dtype=dtype, offload=True)


def chunk_sizes(job: TrainingJob, hardware: Hardware) -> list[int]:
    """Sizes of chunks that come into question, the largest first."""
    given = job.fixed.get("chunk_size", "auto")
    if given != "auto":
        return [given]
    sizes = [n for n in _CHUNKS[hardware.device_type] if job.context / MOST_CHUNKS <= n < 2 * job.context]
    return sizes[::-1] or [_CHUNKS[hardware.device_type][-1 if job.context > 2**17 else 0]]


def keep_options(job: TrainingJob, num_layers: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """What may be kept, and the inputs of how many layers: the fastest first, the leanest last."""
    keeps = [tuple(job.fixed["keep"])] if "keep" in job.fixed else [("attention", "kv"), ("attention",), ()]
    every = [job.fixed["checkpoint_every"]] if "checkpoint_every" in job.fixed else [1, 4, 8]
    for keep in keeps:
        for n in every:
            if n <= max(1, num_layers // 2):
                yield keep, n


def longer(job: TrainingJob, context: int) -> TrainingJob:
    """The same with another length."""
    return replace(job, context=context)
