"""The processes of a training run: which of them this is, and what they do together."""

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
from trunkline.distributed.mesh import ParallelDims, parallel_dims_of
from trunkline.distributed.state_dict import full_state_dict
from trunkline.train.build_model import resolve_device
from trunkline.train.recipe import Recipe
from trunkline.train.settings import RecipeError

# A collective may wait for a rank that is this many times slower than expected, or busy elsewhere for so long.
_PATIENCE, _LEAST = 20, timedelta(minutes=3)
_START = timedelta(hours=1)  # until something is known of the model: files are read and cut before the first step


class RankLog(io.StringIO):
    """What a process writes that does not show the run: kept until there is a file for it."""

    def __init__(self) -> None:
        super().__init__()
        self._file: TextIO | None = None

    def open(self, path: Path) -> None:
        """Go on in a file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("w", encoding="utf-8")
        self._file.write(self.getvalue())
        self._file.flush()

    def write(self, text: str) -> int:
        """Append."""
        if self._file is None:
            return super().write(text)
        count = self._file.write(text)
        self._file.flush()
        return count


@dataclass(frozen=True)
class World:
    """What this process knows of the others.

    Attributes:
        mesh: of all ranks; None where there is one process.
        degrees: how they are divided.
        rank: of this process, from 0.
        replica: which of the `parallel_dims.dp` it belongs to, from 0.
    """

    mesh: DeviceMesh | None = None
    parallel_dims: ParallelDims = field(default_factory=ParallelDims)
    rank: int = 0
    replica: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the process that shows the run and writes its output."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def local_size(self) -> int:
        """Processes of the run on this machine."""
        return 1 if self.mesh is None else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

    def sum_over_replicas(self, value: float) -> float:
        """The sum over replicas of a number that all ranks of a replica have."""
        if self.mesh is None or self.parallel_dims.dp == 1:
            return value
        total = torch.tensor(value, dtype=torch.float64, device=self.mesh.device_type)
        dist.all_reduce(total, group=self.mesh["dp"].get_group())
        return float(total)

    def share_folder(self, folder: Path | None) -> Path:
        """The folder that rank 0 gives."""
        if self.mesh is None:
            assert folder is not None
            return folder
        return Path(failure.broadcast_text("output", None if folder is None else str(folder)))

    def expect_step_seconds(self, seconds: float) -> None:
        """Have collectives fail when they take far longer than a step does.

        Args:
            seconds: that a step is expected to take.
        """
        self._set_timeout(max(_LEAST, timedelta(seconds=_PATIENCE * seconds)))

    def allow_long_waits(self) -> None:
        """Have collectives wait for what does not depend on steps."""
        self._set_timeout(_START)

    def _set_timeout(self, timeout: timedelta) -> None:
        if self.mesh is None:
            return
        for group in {id(g): g for g in _groups(self.mesh)}.values():
            dist.distributed_c10d._set_pg_timeout(timeout, group)

    def barrier(self) -> None:
        """Until all are here."""
        if self.mesh is not None:
            with failure.guard():
                dist.barrier()

    def shut_down(self) -> None:
        """Nothing more is done together."""
        if self.mesh is not None:
            dist.destroy_process_group()

    def gather_model(self, model: nn.Module, dtype: torch.dtype) -> tuple[nn.Module, dict[str, torch.Tensor] | None]:
        """What `save_pretrained` takes of a model that may be spread over ranks; every rank must call it.

        Args:
            model: The model.
            dtype: Of its parameters in the file, if it is spread.

        Returns:
            A model of its class and config, and all parameters on rank 0's host; the model itself where it is whole.
        """
        if self.mesh is None:
            return model, None
        with failure.guard():
            found = full_state_dict(model)
        with torch.device("meta"):
            blank: Any = AutoModelForCausalLM.from_config(model.config, dtype=dtype)
        blank.generation_config = model.generation_config
        return blank, {name: x.to(dtype) if x.is_floating_point() else x for name, x in found.items()}


def join(recipe: Recipe) -> World:
    """Join the run's other processes, if torchrun has started several.

    Raises:
        ValueError: `ranks` asks for several processes, and there is one; or does not make up their number.
    """
    with failure.guard():
        return _join(recipe)


def _join(recipe: Recipe) -> World:
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
        _be_the_only_rank()  # of FSDP2, which is what moves parameters to the host and back
    if ":" in recipe.device and world_size > 1:
        raise RecipeError(
            f"device: '{recipe.device}' names one device, and there are {world_size} processes, each with its own: set "
            "device to cuda."
        )
    resolve_device(recipe.device)
    device_type = {"auto": None, "cpu": "cpu"}.get(recipe.device, "cuda")
    mesh = trunkline.init_mesh(dp=ranks.dp, sp=ranks.sp, cp=ranks.cp, tp=ranks.tp,
                               device_type=device_type, timeout=_START)  # fmt: skip
    parallel_dims = parallel_dims_of(mesh)
    if recipe.batch_size % parallel_dims.dp:
        raise RecipeError(
            f"batch_size ({recipe.batch_size}, global) is not a multiple of ranks.dp ({parallel_dims.dp}): every "
            f"replica takes an equal share of each micro-batch. Set batch_size to {parallel_dims.dp}, "
            f"{2 * parallel_dims.dp}, …"
        )
    return World(mesh, parallel_dims, dist.get_rank(), mesh["dp"].get_local_rank())


def _be_the_only_rank() -> None:
    """What torchrun would set for one process."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    given = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1",
             "MASTER_PORT": port}  # fmt: skip
    for name, value in given.items():
        os.environ.setdefault(name, str(value))


def expected_seconds(flops: int, device: torch.device, dtype: torch.dtype) -> float:
    """What a step of so many FLOPs on one device may take, by the speed of one matrix product there."""
    size = 512 if device.type == "cpu" else 8_192
    a = torch.randn(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        float((a @ a)[0, 0])
        times.append(time.perf_counter() - start)
    return flops / (2 * size**3 / min(times))


def _groups(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    from trunkline.distributed.mesh import REPLICA_AXES, SEQUENCE_AXES, flatten_axes

    axes = mesh.mesh_dim_names or ()
    world = dist.group.WORLD
    assert world is not None
    flattened = [flatten_axes(mesh, several).get_group() for several in (SEQUENCE_AXES, REPLICA_AXES)]
    return [world, *(mesh[axis].get_group() for axis in axes), *flattened]
