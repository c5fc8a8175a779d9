"""Backends: lanes and storages for each type of device, and the tiers built on them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from typing_extensions import override

from trunkline.offload.lanes.base import Lanes
from trunkline.offload.lanes.cuda import CudaLanes
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.offload.lanes.simulated import SimulatedLanes
from trunkline.offload.lanes.thread import ThreadLanes
from trunkline.offload.storage import HostSlab, ScratchFile, SimulatedStorage, Storage
from trunkline.offload.stores import Backend, Tiers
from trunkline.units import TierName


class CpuBackend(Backend):
    """Backend of a CPU: host memory is the device, and threads access the scratch file. There is no host tier.

    Args:
        folder: folder of the scratch file; None where no disk tier is used.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    @override
    def lanes(self) -> Lanes:
        return ThreadLanes()

    @override
    def storage(self, tier: TierName, nbytes: int) -> Storage:
        assert tier == "disk"
        assert self._folder is not None
        return ScratchFile(self._folder, nbytes)


class CudaBackend(Backend):
    """Backend of a CUDA device: a slab of pinned host memory, and a scratch file beyond it.

    Args:
        device: the device.
        folder: folder of the scratch file; None where no disk tier is used.
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._device = device
        self._folder = folder

    @override
    def lanes(self) -> Lanes:
        return CudaLanes(self._device)

    @override
    def storage(self, tier: TierName, nbytes: int) -> Storage:
        if tier == "host":
            return HostSlab(nbytes, self._device)
        assert self._folder is not None
        return ScratchFile(self._folder, nbytes)


class SimulatedBackend(Backend):
    """Backend for tensors on the `meta` device: it stores and moves nothing.

    Args:
        clock: clock that moves advance; None makes every move take no time.
        linked: whether host memory lies behind a link (PCIe), or is the device itself.
    """

    def __init__(self, clock: SimClock | None, *, linked: bool) -> None:
        self._clock, self._linked = clock, linked

    @override
    def lanes(self) -> Lanes:
        return SimulatedLanes(self._clock, linked=self._linked)

    @override
    def storage(self, tier: TierName, nbytes: int) -> Storage:
        return SimulatedStorage(nbytes)


def tiers_for(
    device: torch.device,
    budgets: tuple[int | None, int | None, int | None],
    offload_dir: str | Path | None,
    prefetch: int,
    *,
    simulated: bool = False,
    clock: SimClock | None = None,
) -> Tiers:
    """Build the tiers of a model on this rank. Nothing is allocated yet.

    Args:
        device: of the model; in a simulation the device that is simulated, while tensors are on `meta`.
        budgets: this rank's bytes of the device, host and disk tier. None is no limit on the device and no host tier.
            For the disk None is this rank's share of the space that is free now, if `offload_dir` is given. On a CPU,
            whose memory is the device, the first two are added up to one budget.
        offload_dir: existing folder of the scratch file; None for no disk tier.
        prefetch: chunks of one offloaded store on the device at a time, in use or in flight.
        simulated: allocate and move nothing.
        clock: clock that simulated lanes advance; None makes every move take no time. Without `simulated` it is not
            used.

    Returns:
        The tiers.

    Raises:
        ValueError: a host budget without a device budget, except on a CPU; or a device budget on a device that is
            neither a CPU nor CUDA.
    """
    device_budget, host_budget, disk_budget = budgets
    folder = None if offload_dir is None else Path(offload_dir)
    if folder is not None and disk_budget is None:
        # Processes that torchrun starts on one machine share its disk.
        disk_budget = shutil.disk_usage(folder).free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cpu":  # host memory is the device: one budget for both
        if device_budget is not None or host_budget is not None:
            device_budget = (device_budget or 0) + (host_budget or 0)
        host_budget = None
    elif device_budget is None and host_budget is not None:
        raise ValueError(
            f"host_budget has no effect on {device.type} without a device_budget, beyond which chunks are offloaded: "
            "set one."
        )
    elif device.type != "cuda" and device_budget is not None:
        raise ValueError(f"device_budget is for CPU and CUDA devices, not for {device.type}: leave it out.")
    backend: Backend
    if simulated:
        backend = SimulatedBackend(clock, linked=device.type == "cuda")
    else:
        backend = CudaBackend(device, folder) if device.type == "cuda" else CpuBackend(folder)
    return Tiers({"device": device_budget, "host": host_budget, "disk": disk_budget}, backend, prefetch)
