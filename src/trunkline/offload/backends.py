"""Tiers as a machine has them: what a device of each type can use beyond itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch

from trunkline.config import StreamConfig
from trunkline.offload.lanes.base import Lanes
from trunkline.offload.lanes.cuda import CudaLanes
from trunkline.offload.lanes.sim_clock import SimClock
from trunkline.offload.lanes.simulated import SimulatedLanes
from trunkline.offload.lanes.thread import ThreadLanes
from trunkline.offload.storage import HostSlab, ScratchFile, SimulatedStorage, Storage
from trunkline.offload.stores import Backend, Tiers
from trunkline.units import TierName


class CpuBackend:
    """Host memory is the device; files are reached by threads.

    Args:
        folder: for the scratch file.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def lanes(self) -> Lanes:
        """See `Backend.lanes`."""
        return ThreadLanes()

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        """See `Backend.storage`."""
        assert tier == "disk"
        assert self._folder is not None
        return ScratchFile(self._folder, nbytes)


class CudaBackend:
    """Host memory in one registered slab; files behind it.

    Args:
        device: the device.
        folder: for the scratch file.
    """

    def __init__(self, device: torch.device, folder: Path | None) -> None:
        self._device = device
        self._folder = folder

    def lanes(self) -> Lanes:
        """See `Backend.lanes`."""
        return CudaLanes(self._device)

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        """See `Backend.storage`."""
        if tier == "host":
            return HostSlab(nbytes, self._device)
        assert self._folder is not None
        return ScratchFile(self._folder, nbytes)


class SimulatedBackend:
    """Nothing at all, for tensors on the `meta` device.

    Args:
        clock: of the machine; None for one on which everything is over at once.
        linked: whether its host memory lies behind a link.
    """

    def __init__(self, clock: SimClock | None, *, linked: bool) -> None:
        self._clock, self._linked = clock, linked

    def lanes(self) -> Lanes:
        """See `Backend.lanes`."""
        return SimulatedLanes(self._clock, linked=self._linked)

    def storage(self, tier: TierName, nbytes: int) -> Storage:
        """See `Backend.storage`."""
        return SimulatedStorage(nbytes)


def tiers_for(
    device: torch.device, config: StreamConfig, *, virtual: bool = False, clock: SimClock | None = None
) -> Tiers:
    """The tiers of a model on a device.

    Args:
        device: its own.
        config: with the budgets.
        virtual: nothing is to be allocated or moved.
        clock: that virtual lanes keep time with; None for none.

    Raises:
        ValueError: budgets are set for a type of device that has no lanes.
    """
    device_budget, host_budget, disk_budget = config.budgets
    folder = None if config.offload_dir is None else Path(config.offload_dir)
    if folder is not None and disk_budget is None:
        # Processes that torchrun starts on one machine share its disk.
        disk_budget = shutil.disk_usage(folder).free // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type == "cpu":  # host memory is the device
        if device_budget is not None or host_budget is not None:
            device_budget = (device_budget or 0) + (host_budget or 0)
        host_budget = None
    elif device_budget is None and host_budget is not None:
        raise ValueError(
            f"host_budget has no effect on {device.type} without a device_budget, beyond which chunks leave the "
            "device: set one."
        )
    elif device.type != "cuda" and device_budget is not None:
        raise ValueError(f"device_budget is for CPU and CUDA devices, not for {device.type}: leave it out.")
    backend: Backend = CudaBackend(device, folder) if device.type == "cuda" else CpuBackend(folder)
    backend = SimulatedBackend(clock, linked=device.type == "cuda") if virtual else backend
    return Tiers({"device": device_budget, "host": host_budget, "disk": disk_budget}, backend, config.prefetch)
