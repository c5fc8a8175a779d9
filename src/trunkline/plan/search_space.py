"""Search space of a plan: clusters and jobs, and the candidate settings for a job."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from trunkline.distributed.mesh import ParallelDims, divisors
from trunkline.plan.hardware import Hardware
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.simulated_sharding import ShardingSpec

# Device memory that no tensor accounts for: the CUDA context, workspaces of libraries, buffers of NCCL.
_CONTEXT_BYTES = 3 * 2**29
_FRAGMENTATION = 0.04  # share of device memory that an allocator cannot use
_HOST_REST = 0.1  # share of host memory for other programs, the page cache and Python itself
_CHUNK_SIZES = {"cuda": tuple(2**n for n in range(12, 19)), "cpu": tuple(2**n for n in range(9, 14))}
MOST_CHUNKS = 128  # of a sequence: more only make a step slower


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines that a plan is for: one node, or several equal ones.

    Attributes:
        hardware: profile of a node.
        devices: devices of all nodes.
        host_bytes: bytes of a node's host memory.
        disk_bytes: bytes of a node's scratch disks; 0 for none.

    Raises:
        ValueError: a number is out of range.
    """

    hardware: Hardware
    devices: int
    host_bytes: int
    disk_bytes: int = 0

    def __post_init__(self) -> None:
        """Check the numbers."""
        if not isinstance(self.devices, int) or isinstance(self.devices, bool) or self.devices < 1:
            raise ValueError(f"gpus={self.devices!r}: give a positive whole number of devices.")
        if self.host_bytes <= 0:
            raise ValueError(f"host_memory={self.host_bytes!r}: give the memory of a node, such as '1TiB'.")
        if self.disk_bytes < 0:
            raise ValueError(f"disk={self.disk_bytes!r}: give the bytes of a node's scratch disks, or 0 for none.")

    @property
    def devices_per_node(self) -> int:
        """Devices of a node that the cluster uses."""
        return min(self.devices, self.hardware.devices_per_node)

    @property
    def usable_bytes(self) -> dict[str, int]:
        """Bytes of each tier (device, host, disk) that one rank can use; 0 for host memory where it is the device.

        Ranks of a node share host memory and disks equally. Memory that an allocator, libraries and other programs need
        is left out.
        """
        memory, sharing = self.hardware.memory_bytes, self.devices_per_node
        device, host = int(memory * (1 - _FRAGMENTATION)) - _CONTEXT_BYTES, self.host_bytes
        if self.hardware.link is None:  # host memory is the device
            device, host = int(min(memory, host // sharing) * (1 - _HOST_REST)), 0
        return {"device": device, "host": int(host * (1 - _HOST_REST)) // sharing, "disk": self.disk_bytes // sharing}


@dataclass(frozen=True, slots=True)
class TrainingJob:
    """Step to be planned.

    Attributes:
        context: tokens of a row, over all ranks.
        batch_size: rows of a micro-batch, over all replicas.
        optimizer: optimizer whose state is held; None for none.
        fixed: settings of `trunkline.stream` that are not chosen; a budget among them is an upper limit.
        parallel_dims: mesh; None to choose one.
        sharding_spec: sharding of parameters over it; None to choose it.
        micro_batches: micro-batches of a step.
    """

    context: int
    batch_size: int = 1
    optimizer: AdamWSpec | None = field(default_factory=AdamWSpec)
    fixed: dict[str, Any] = field(default_factory=dict)
    parallel_dims: ParallelDims | None = None
    sharding_spec: ShardingSpec | None = None
    micro_batches: int = 1

    def rows(self, parallel_dims: ParallelDims) -> int:
        """Return the rows of one replica in a micro-batch, at least 1."""
        return max(self.batch_size // parallel_dims.dp, 1)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Settings to try for a job; budgets follow from the memory that they leave.

    Attributes:
        parallel_dims: mesh.
        sharding_spec: sharding of parameters over the mesh.
        chunk_size: tokens of a chunk, over all ranks.
        keep: activations kept between forward and backward.
        checkpoint_every: layers between kept layer inputs.
    """

    parallel_dims: ParallelDims
    sharding_spec: ShardingSpec
    chunk_size: int
    keep: tuple[str, ...] = ("attention",)
    checkpoint_every: int = 1

    @property
    def streaming(self) -> dict[str, Any]:
        """Settings of `trunkline.stream` of the group `streaming`."""
        return {"chunk_size": self.chunk_size, "keep": self.keep, "checkpoint_every": self.checkpoint_every}

    @property
    def ranks(self) -> dict[str, Any]:
        """Settings of a recipe's group `ranks`: dp, sp, cp, tp, zero and offload."""
        return {**asdict(self.parallel_dims), "zero": self.sharding_spec.zero, "offload": self.sharding_spec.offload}

    def __str__(self) -> str:
        """Return the settings that differ from the simplest ones, for people."""
        text = f"chunk_size {self.chunk_size:,}, keep [{', '.join(self.keep)}]"
        if self.checkpoint_every > 1:
            text += f", checkpoint_every {self.checkpoint_every}"
        if self.parallel_dims != ParallelDims():
            text += f", {self.parallel_dims}, zero={self.sharding_spec.zero}"
        return text + (", offload" if self.sharding_spec.offload else "")


def meshes(job: TrainingJob, cluster: Cluster, num_heads: int, *, one_sequence: bool = False) -> Iterator[ParallelDims]:
    """Yield meshes over all devices, the one with most replicas first, since replicas communicate least.

    The devices of a replica share its sequence: sp is as large as the heads allow, cp is the rest, tp is 1. If the job
    has a mesh, it is the only one.

    Args:
        job: job whose batch the replicas share.
        cluster: devices of the mesh.
        num_heads: query heads of the model.
        one_sequence: yield only the mesh whose devices share one sequence.
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
    """Yield ways to shard parameters over a mesh, the fastest first; only the job's own if it has one."""
    if job.sharding_spec is not None:
        yield job.sharding_spec
        return
    # `trunkline train` shards the float32 master weights, and gathers them in the model's dtype.
    dtype = torch.float32 if job.optimizer is not None and job.optimizer.fp32_master else None
    if parallel_dims.fsdp_size == 1:
        yield ShardingSpec(zero=0)
    else:
        for zero in (2, 3):
            yield ShardingSpec(zero=zero, dtype=dtype)
    yield ShardingSpec(zero=3, dtype=dtype, offload=True)


def chunk_sizes(job: TrainingJob, hardware: Hardware) -> list[int]:
    """Return chunk sizes to try, in tokens over all ranks, the largest first; only the job's own if it has one."""
    fixed = job.fixed.get("chunk_size", "auto")
    if fixed != "auto":
        return [fixed]
    all_sizes = _CHUNK_SIZES[hardware.device_type]
    sizes = [n for n in all_sizes if job.context / MOST_CHUNKS <= n < 2 * job.context]
    return sizes[::-1] or [all_sizes[-1 if job.context > 2**17 else 0]]


def longest_searched(job: TrainingJob, hardware: Hardware) -> int:
    """Return the tokens at which a search for the longest context ends: more chunks take minutes to simulate."""
    fixed = job.fixed.get("chunk_size", "auto")
    return MOST_CHUNKS * (_CHUNK_SIZES[hardware.device_type][-1] if fixed == "auto" else 4 * int(fixed))


def keep_options(job: TrainingJob, num_layers: int) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield pairs of `keep` and `checkpoint_every`, from the fastest to the one with the least memory.

    A value that the job fixes is the only one. Else a `checkpoint_every` of more than half of the layers is left out.
    """
    keeps = [tuple(job.fixed["keep"])] if "keep" in job.fixed else [("attention", "kv"), ("attention",), ()]
    useful = [n for n in (1, 4, 8) if n <= max(1, num_layers // 2)]
    every = [job.fixed["checkpoint_every"]] if "checkpoint_every" in job.fixed else useful
    yield from itertools.product(keeps, every)
