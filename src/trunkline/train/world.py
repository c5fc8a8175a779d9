"""Processes of a training run: rank of this process, and collective operations."""

from __future__ import annotations

import io
import os
import socket
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

import trunkline
from trunkline.distributed import failure
from trunkline.distributed.mesh import REPLICA_AXES, SEQUENCE_AXES, ParallelDims, flatten_axes, parallel_dims_of
from trunkline.distributed.state_dict import full_state_dict
from trunkline.train.load_recipe import RecipeError
from trunkline.train.recipe import Recipe
from trunkline.utils.devices import parse_device

# Timeout of collectives during steps: so many times the seconds of a step, and at least so long.
_TIMEOUT_STEPS, _MIN_TIMEOUT = 20, timedelta(minutes=3)
_LONG_TIMEOUT = timedelta(hours=1)  # outside of steps: reading files, loading and saving the model


class RankLog(io.StringIO):
    """Output of a rank other than 0: kept in memory until its log file is open."""

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        """Write the kept output to a new file, and all later output too; a file of that name is replaced."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.write(self.getvalue())
        self._file.flush()

    def write(self, text: str) -> int:
        """Append text."""
        if self._file is None:
            return super().write(text)
        count = self._file.write(text)
        self._file.flush()
        return count


@dataclass(frozen=True)
class World:
    """Processes of a run, seen from this one.

    Attributes:
        mesh: device mesh of all ranks; None for a single process.
        parallel_dims: sizes of the mesh's dimensions.
        rank: rank of this process, from 0.
        replica: index of its data-parallel replica, from 0.
    """

    mesh: DeviceMesh | None = None
    parallel_dims: ParallelDims = field(default_factory=ParallelDims)
    rank: int = 0
    replica: int = 0

    @property
    def is_main(self) -> bool:
        """True if this process shows the run and writes its output."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Number of processes of the run."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def local_size(self) -> int:
        """Number of processes of the run on this machine, as torchrun says; 1 where it does not."""
        return 1 if self.mesh is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def sum_over_replicas(self, value: float) -> float:
        """Return the sum over replicas of a number that is equal on all ranks of a replica; all ranks call this."""
        if self.mesh is None or self.parallel_dims.dp == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return float(total)

    def share_folder(self, folder: Path | None) -> Path:
        """Broadcast rank 0's folder to all ranks; the other ranks pass None and wait for it.

        Raises:
            RankError: another rank failed meanwhile.
        """
        if self.mesh is None:
            assert folder is not None
            return folder
        return Path(failure.broadcast_text("output", None if folder is None else str(folder)))

    def expect_step_seconds(self, seconds: float) -> None:
        """Set the timeout of collectives to 20 steps, at least 3 minutes, so that a lost rank is noticed soon.

        Args:
            seconds: expected seconds of a step.
        """
        self._set_timeout(max(_MIN_TIMEOUT, timedelta(seconds=_TIMEOUT_STEPS * seconds)))

    def allow_long_waits(self) -> None:
        """Set the timeout of collectives to an hour, for work outside of steps."""
        self._set_timeout(_LONG_TIMEOUT)

    def _set_timeout(self, timeout: timedelta) -> None:
        if self.mesh is None:
            return
        for group in {id(g): g for g in _groups(self.mesh)}.values():
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def barrier(self) -> None:
        """Wait until all processes have called this.

        Raises:
            RankError: another rank failed meanwhile.
        """
        if self.mesh is not None:
            with failure.guard():
                dist.barrier()

    def shut_down(self) -> None:
        """Leave the process group."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def gather_model(self, model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor] | None]:
        """Gather a model that may be sharded over ranks, for `save_pretrained`; every rank must call this.

        Args:
            model: the model.
            dtype: dtype of the returned parameters; without effect for a single process.

        Returns:
            For a single process the model itself and None. Otherwise a model of the same config without values, and all
            parameters and buffers in host memory; on ranks other than 0 these are an empty dict.

        Raises:
            RankError: another rank failed meanwhile.
        """
        if self.mesh is None:
            return model, None
        with failure.guard():
            state_dict = full_state_dict(model)
        with torch.device("meta"):
            empty_model: Any = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
        empty_model.generation_config = model.generation_config
        return empty_model, {name: x.to(dtype) if x.is_floating_point() else x for name, x in state_dict.items()}


@failure.guard()
def join(recipe: Recipe) -> World:
    """Join the other processes of the run, if torchrun has started several.

    A single process with `ranks.offload` forms a process group of its own.

    Returns:
        The processes of the run; without a mesh for any other single process.

    Raises:
        ValueError: `ranks` does not make up the number of processes, `device` does not exist or names one device for
            several processes, or `batch_size` is no multiple of `ranks.dp`.
        RankError: another rank failed meanwhile.
    """
    ranks = recipe.ranks
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    asked = (ranks.dp or 1) * ranks.sp * ranks.cp * ranks.tp
    if world_size == 1:
        if asked > 1:
            raise RecipeError(
                f"ranks asks for {asked} processes, and this is one: start it with torchrun --nproc-per-node "
                f"{asked} -m trunkline train …, or leave ranks out."
            )
        if not ranks.offload:
            return World()
        _set_single_rank()  # of FSDP2, which is what moves parameters to the host and back
    if ":" in recipe.device and world_size > 1:
        raise RecipeError(
            f"device: '{recipe.device}' names one device, and there are {world_size} processes, each with its own: set "
            "device to cuda."
        )
    parse_device(recipe.device)
    device_type = {"auto": None, "cpu": "cpu"}.get(recipe.device, "cuda")
    mesh = trunkline.init_mesh(dp=ranks.dp, sp=ranks.sp, cp=ranks.cp, tp=ranks.tp,
                               device_type=device_type, timeout=_LONG_TIMEOUT)  # fmt: skip
    parallel_dims = parallel_dims_of(mesh)
    if recipe.batch_size % parallel_dims.dp:
        raise RecipeError(
            f"batch_size ({recipe.batch_size}, global) is not a multiple of ranks.dp ({parallel_dims.dp}): every "
            f"replica takes an equal share of each micro-batch. Set batch_size to {parallel_dims.dp}, "
            f"{2 * parallel_dims.dp}, …"
        )
    return World(mesh, parallel_dims, dist.get_rank(), mesh["dp"].get_local_rank())


def _set_single_rank() -> None:
    """Set the environment variables that torchrun sets, for a single process; those that exist stay."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    variables = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": port}  # fmt: skip
    for name, value in variables.items():
        os.environ.setdefault(name, str(value))


def expected_seconds(flops: int, device: torch.device, dtype: torch.dtype) -> float:
    """Estimate the seconds of `flops` FLOPs on one device, by timing a matrix product there."""
    size = 512 if device.type == "cpu" else 8_192
    a = torch.randn(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        times.append(time.perf_counter() - start)
    return flops / (2 * size**3 / min(times))


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    axes = mesh.mesh_dim_names or ()
    world = dist.group.WORLD
    assert world is not None
    flattened = [flatten_axes(mesh, several).get_group() for several in (SEQUENCE_AXES, REPLICA_AXES)]
    return [world, *(mesh[axis].get_group() for axis in axes), *flattened]
