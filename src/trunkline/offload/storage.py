"""Storages of the tiers beyond the device: a slab of host memory and a scratch file, cut by a `RangeAllocator`."""

from __future__ import annotations

import contextlib
import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.offload.allocator import RangeAllocator
from trunkline.units import TierName, format_bytes


class TierError(RuntimeError):
    """Failure of a tier to reserve memory, or to store or return data.

    Parameters and optimizer state are unchanged. Gradients may be incomplete: zero them before the next step.
    """


@dataclass(slots=True)
class StorageBlock:
    """Range of bytes in a storage that holds one tensor at a time.

    Attributes:
        storage: the storage.
        tier: tier of the storage.
        offset: first byte within the storage.
        capacity: most bytes that may be written.
        checksum: checksum of the data last written; None for a storage that keeps none.
    """

    storage: Storage
    tier: TierName
    offset: int
    capacity: int
    checksum: int | None = None


class Storage(Protocol):
    """Memory of one tier beyond the device.

    Attributes:
        ranges: allocator of its bytes.
    """

    ranges: RangeAllocator

    def write(self, block: StorageBlock, data: Tensor) -> None:
        """Write `data`, uint8 (nbytes,) in host memory, to the beginning of a block.

        Raises:
            TierError: the data could not be written.
        """
        ...

    def read(self, block: StorageBlock, into: Tensor) -> None:
        """Read the beginning of a block into `into`, uint8 (nbytes,) in host memory.

        Raises:
            TierError: the data could not be read, or is not what was written.
        """
        ...


class HostSlab(Storage):
    """One allocation of host memory, pinned for a CUDA device.

    PyTorch's allocator of pinned memory rounds every block up to a power of two (pytorch#150517), up to twice what is
    needed, and pinning takes long. So the slab is pinned once, up front, and cut by our own allocator.

    Args:
        nbytes: bytes of the slab.
        device: CUDA device to pin it for; None leaves it unpinned.

    Raises:
        TierError: the driver refuses to pin so much memory.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.ranges = RangeAllocator(nbytes)
        # A tensor made in inference mode could not be used in training; the slab may be made first in an evaluation.
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        if device is not None and nbytes:
            _register(self.memory, device)
            weakref.finalize(self, _unregister, self.memory, device)

    def view(self, block: StorageBlock, nbytes: int) -> Tensor:
        """Return the first bytes of a block as a view of the slab, uint8 (nbytes,)."""
        return self.memory[block.offset : block.offset + nbytes]

    @override
    def write(self, block: StorageBlock, data: Tensor) -> None:
        self.view(block, data.nbytes).copy_(data)

    @override
    def read(self, block: StorageBlock, into: Tensor) -> None:
        into.copy_(self.view(block, into.nbytes))


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            return
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device=device)  # clears the error, which the next kernel launch would report otherwise
    raise TierError(
        f"the driver could not pin {format_bytes(memory.nbytes)} of host memory (error {int(code)}): lower "
        "host_budget, or raise the limit of locked memory (ulimit -l)."
    )


def _unregister(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # copies may be in flight
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


_HOW_TO_RECOVER = (
    "Parameters and optimizer state are unchanged: zero the gradients before the next step, and free some space on "
    "that disk or set offload_dir to another folder."
)
_READ_SIZE = 512 * 2**10  # bytes of one read: they are still in the processor's cache when they are hashed


class ScratchFile(Storage):
    """Temporary file without a name, so that a crash leaves nothing behind.

    Every block has a checksum (XXH3, 64 bits), verified when it is read. The file is closed, and its space freed, when
    the object is garbage-collected.

    Args:
        folder: existing folder on the disk to use.
        nbytes: most bytes of the file.

    Raises:
        ValueError: the folder does not exist, or no file can be created in it.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        import xxhash  # imported here: without a disk tier it need not be installed

        self._hasher: Callable[[], Any] = xxhash.xxh3_64
        self.ranges = RangeAllocator(nbytes)
        self.name = f"scratch file in {folder}"
        try:
            file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(
                f"offload_dir={str(folder)!r}: {reason}. Give a folder that exists and can be written to."
            ) from None
        self._descriptor = file.fileno()
        os.fchmod(self._descriptor, 0o600)
        weakref.finalize(self, file.close)

    def preallocate(self, start: int, nbytes: int) -> None:
        """Allocate bytes `start … start + nbytes - 1` of the file on the disk, before a step can fill the disk midway.

        Raises:
            TierError: the disk has less free space.
        """
        try:
            os.posix_fallocate(self._descriptor, start, nbytes)
        except OSError as error:
            room = os.fstatvfs(self._descriptor)
            free = room.f_bavail * room.f_frsize
            raise TierError(
                f"the {self.name} needs {format_bytes(nbytes)} for this step, and {format_bytes(free)} are free "
                f"({error.strerror}): free some space, set offload_dir to another folder, or a larger host_budget or "
                "device_budget."
            ) from error

    @override
    def write(self, block: StorageBlock, data: Tensor) -> None:
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], block.offset + done)
        except OSError as error:
            raise TierError(
                f"writing {format_bytes(len(view))} to the {self.name} failed: {error.strerror}. {_HOW_TO_RECOVER}"
            ) from error
        hasher = self._hasher()
        hasher.update(view)
        block.checksum = hasher.intdigest()

    @override
    def read(self, block: StorageBlock, into: Tensor) -> None:
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        done, hasher = 0, self._hasher()
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + _READ_SIZE]], block.offset + done)
            except OSError as error:
                raise TierError(f"reading from the {self.name} failed: {error.strerror}. {_HOW_TO_RECOVER}") from error
            if count == 0:
                raise TierError(f"the {self.name} is {format_bytes(len(view) - done)} too short. {_HOW_TO_RECOVER}")
            hasher.update(view[done : done + count])
            done += count
        if hasher.intdigest() != block.checksum:
            raise TierError(f"the {self.name} returned other bytes than were written. {_HOW_TO_RECOVER}")


class SimulatedStorage(Storage):
    """Storage that allocates ranges and stores nothing, for tensors on the `meta` device.

    Args:
        nbytes: bytes to allocate ranges from.
    """

    def __init__(self, nbytes: int) -> None:
        self.ranges = RangeAllocator(nbytes)

    @override
    def write(self, block: StorageBlock, data: Tensor) -> None:
        pass

    @override
    def read(self, block: StorageBlock, into: Tensor) -> None:
        pass
