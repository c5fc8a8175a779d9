"""Device mesh of a job: building it, and checking its degrees.

Axes, outermost first: `dp` (replicas with different data), `cp` and `sp` (ranks that share a sequence), `tp` (ranks
that share matrices).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trunkline.distributed import failure

AXES = ("dp", "cp", "sp", "tp")
SEQUENCE_AXES = ("cp", "sp")  # ranks that hold different tokens of one sequence
REPLICA_AXES = ("dp", "cp", "sp")  # ranks that compute gradients of the same parameters


@dataclass(frozen=True, slots=True)
class ParallelDims:
    """Number of ranks along each axis of the mesh.

    Attributes:
        dp: replicas, each with different data.
        sp: ranks that share a sequence; attention is divided by heads (Ulysses).
        cp: ranks that share a sequence; attention is divided by query rows, keys and values are gathered.
        tp: ranks that share every matrix, and have the same tokens.
    """

    dp: int = 1
    sp: int = 1
    cp: int = 1
    tp: int = 1

    def __str__(self) -> str:
        return ", ".join(f"{axis}={getattr(self, axis)}" for axis in ("dp", "sp", "cp", "tp"))

    @property
    def world_size(self) -> int:
        """Ranks of the whole mesh."""
        return self.fsdp_size * self.tp

    @property
    def fsdp_size(self) -> int:
        """Ranks that parameters are sharded over, and gradients are summed over."""
        return self.dp * self.sp * self.cp

    def check_world(self, world_size: int) -> None:
        """Refuse degrees that are not positive integers, or whose product is not the number of ranks of the job.

        Raises:
            ValueError: a degree or the product is wrong; the text names a dp that would fit, if there is one.
        """
        for axis in AXES:
            degree = getattr(self, axis)
            if not isinstance(degree, int) or isinstance(degree, bool) or degree < 1:
                raise ValueError(f"{axis}={degree!r}: give a positive whole number of ranks.")
        rest = self.sp * self.cp * self.tp
        if self.dp * rest != world_size:
            fix = (
                f"set dp={world_size // rest}"
                if world_size % rest == 0
                else f"sp x cp x tp must divide {world_size}: {rest} does not"
            )
            raise ValueError(
                f"{self} makes {self.dp * rest} ranks, but the job has a world size of {world_size}: {fix}, or start "
                f"{self.dp * rest} processes (torchrun --nproc-per-node)."
            )

    def check_heads(self, num_heads: int, num_kv_heads: int) -> None:
        """Refuse degrees that do not divide the attention heads.

        `tp` must divide query heads and key/value heads, `sp` the query heads of one tp rank. `dp` and `cp` fit any
        number of heads.

        Args:
            num_heads: number of query heads of the model.
            num_kv_heads: number of key/value heads of the model.

        Raises:
            ValueError: `tp` or `sp` does not divide them; the text names its valid values.
        """
        heads = f"{num_heads} query and {num_kv_heads} key/value heads (world size {self.world_size})"
        if num_heads % self.tp or num_kv_heads % self.tp:
            valid = [n for n in divisors(num_kv_heads) if num_heads % n == 0]
            raise ValueError(f"tp={self.tp} does not divide {heads}: valid values of tp are {_list(valid)}.")
        local = num_heads // self.tp
        if local % self.sp:
            within = f" of {local} query heads on each of {self.tp} tp ranks" if self.tp > 1 else ""
            raise ValueError(
                f"sp={self.sp} does not divide {heads}{within}: valid values of sp are {_list(divisors(local))}. For "
                f"the same number of ranks on any number of heads use cp={self.sp} instead, or split them: "
                f"sp={_largest(local, self.sp)}, cp={self.sp // _largest(local, self.sp)}."
            )


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]


def _largest(number: int, degree: int) -> int:
    return max(n for n in divisors(degree) if number % n == 0)


def _list(values: list[int]) -> str:
    return ", ".join(map(str, values))


def init_mesh(
    *,
    dp: int | None = None,
    sp: int = 1,
    cp: int = 1,
    tp: int = 1,
    model: Any = None,
    device_type: str | None = None,
    timeout: timedelta | None = None,
) -> DeviceMesh:
    """Build the device mesh of all ranks, and join the process group first if that was not done.

    Consecutive ranks form `tp` groups first, then `sp`, then `cp`: groups that exchange most stay within a node. Start
    the processes with torchrun; all ranks call this with the same arguments. It also starts a thread that ends this
    process when it waits for a rank that has failed.

    Args:
        dp: number of replicas, each with different data; None uses all ranks that the other degrees leave.
        sp: ranks that share a sequence, divided by heads in attention; must divide the query heads of one tp rank.
        cp: ranks that share a sequence, divided by query rows in attention; any number.
        tp: ranks that share every matrix; must divide the query heads and the key/value heads.
        model: model, or its config, to check the degrees against its heads; None leaves that to `shard` or `stream`.
        device_type: `cuda` or `cpu`; None chooses cuda if it is available.
        timeout: time after which a collective fails; None is PyTorch's default. It has no effect if the process group
            was joined before.

    Returns:
        A mesh with the axes dp, cp, sp, tp, those of one rank included.

    Raises:
        ValueError: the program was not started with torchrun, or the degrees do not fit the number of ranks or the
            heads; the text names valid degrees.
    """
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    if not dist.is_initialized():
        if "RANK" not in os.environ:
            raise ValueError(
                "there is no job of several processes here: start this program with torchrun --nproc-per-node N, or "
                "leave init_mesh out."
            )
        if device_type == "cuda":
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    world_size = dist.get_world_size()
    rest = max(sp * cp * tp, 1) if all(isinstance(n, int) for n in (sp, cp, tp)) else 1
    parallel_dims = ParallelDims(max(world_size // rest, 1) if dp is None else dp, sp, cp, tp)
    parallel_dims.check_world(world_size)
    if model is not None:
        parallel_dims.check_heads(*heads_of(model))
    mesh = init_device_mesh(device_type, tuple(getattr(parallel_dims, axis) for axis in AXES), mesh_dim_names=AXES)
    failure.watch()
    return mesh


def parallel_dims_of(mesh: DeviceMesh) -> ParallelDims:
    """Return the degrees of a mesh.

    Raises:
        ValueError: `init_mesh` did not make it.
    """
    if not isinstance(mesh, DeviceMesh) or mesh.mesh_dim_names != AXES:
        raise ValueError(f"mesh={mesh!r}: give the mesh that trunkline.init_mesh returns.")
    return ParallelDims(**{axis: mesh[axis].size() for axis in AXES})


def flatten_axes(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return several axes of a mesh as one axis, the first one outermost.

    Repeated calls return the same mesh: each new one makes a process group. All ranks make the first call together.
    """
    name = "_".join(axes)
    root: Any = mesh
    known = root._flatten_mapping if hasattr(root, "_flatten_mapping") else {}
    return known[name] if name in known else mesh[axes]._flatten(name)


def heads_of(model: Any) -> tuple[int, int]:
    """Return the numbers of query heads and key/value heads of a transformers model or config."""
    config = getattr(model, "config", model).get_text_config()
    num_heads: int = config.num_attention_heads
    num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
    return num_heads, num_kv_heads
