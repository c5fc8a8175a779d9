"""What lies beyond the device: a slab of host memory and a scratch file, each cut into blocks by `RangeAllocator`."""

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

from trunkline.offload.allocator import RangeAllocator
from trunkline.units import TierName, format_bytes


class TierError(RuntimeError):
    """A tier could not take or give back what was entrusted to it.

    Parameters and optimizer are as they were. Gradients may have been added to in part: zero them.
    """


@dataclass(slots=True)
class StorageBlock:
    """A range of bytes of a storage, the home of one tensor.

    Attributes:
        storage: whose.
        tier: of the storage.
        offset: of its first byte.
        capacity: most bytes it can take.
        checksum: of what was last written to it, where the storage keeps one.
    """

    storage: Storage
    tier: TierName
    offset: int
    capacity: int
    checksum: int | None = None


class Storage(Protocol):
    """Memory beyond the device, addressed by bytes."""

    ranges: RangeAllocator

    def write(self, block: StorageBlock, data: Tensor) -> None:
        """Store `data`, uint8 (nbytes,)."""
        ...

    def read(self, block: StorageBlock, into: Tensor) -> None:
        """Fill `into`, uint8 (nbytes,), with what was stored."""
        ...


class HostSlab:
    """One exact piece of host memory, registered with the CUDA driver where it serves a CUDA device.

    The caching allocator of pinned memory rounds every block up to a power of two (pytorch#150517); one registration
    up front, cut by ourselves, takes what it is asked for and never pins during a sweep.

    Args:
        nbytes: its size.
        device: the CUDA device that it serves; None registers nothing.

    Raises:
        TierError: the driver refuses.
    """

    def __init__(self, nbytes: int, device: torch.device | None = None) -> None:
        self.ranges = RangeAllocator(nbytes)
        with torch.inference_mode(False):  # what is first needed in an evaluation serves training, too
            self.memory = torch.empty(nbytes, dtype=torch.uint8)
        if device is not None and nbytes:
            _register(self.memory, device)
            weakref.finalize(self, _unregister, self.memory, device)

    def bytes_of(self, block: StorageBlock, nbytes: int) -> Tensor:
        """The first bytes of a block, uint8 (nbytes,)."""
        return self.memory[block.offset : block.offset + nbytes]

    def write(self, block: StorageBlock, data: Tensor) -> None:
        """See `Storage.write`."""
        self.bytes_of(block, data.nbytes).copy_(data)

    def read(self, block: StorageBlock, into: Tensor) -> None:
        """See `Storage.read`."""
        into.copy_(self.bytes_of(block, into.nbytes))


def _register(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        code = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)  # type: ignore[no-untyped-call]
        if int(code) == 0:
            return
        with contextlib.suppress(RuntimeError):  # the error stays set, and the next kernel launch would report it
            torch.zeros(1, device=device)
    raise TierError(
        f"the driver could not pin {format_bytes(memory.nbytes)} of host memory (error {int(code)}): lower "
        "host_budget, or raise the limit of locked memory (ulimit -l)."
    )


def _unregister(memory: Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # copies may still be on their way
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())  # type: ignore[no-untyped-call]


_PIECE = 512 * 2**10  # bytes of a file that are read at a time


class ScratchFile:
    """A file that nobody else sees: it has no name (or loses it at once), so that a crash leaves nothing behind.

    Every block carries a checksum (XXH3, 64 bits) that is verified when it is read. The file is closed, and its space
    free, when nobody refers to it any more.

    Args:
        folder: where; it must exist.
        nbytes: most bytes it may have.

    Raises:
        ValueError: the folder does not exist, or no file can be made in it.
    """

    def __init__(self, folder: Path, nbytes: int) -> None:
        import xxhash  # here, because a machine without a disk tier need not have it

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

    def reserve(self, start: int, nbytes: int) -> None:
        """Take the room of a run on the disk, before its first sweep.

        Raises:
            TierError: there is not so much.
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

    def write(self, block: StorageBlock, data: Tensor) -> None:
        """See `Storage.write`.

        Raises:
            TierError: the disk is full, or failed.
        """
        view = memoryview(data.numpy())  # type: ignore[arg-type]
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._descriptor, view[done:], block.offset + done)
        except OSError as error:
            raise TierError(
                f"writing {format_bytes(len(view))} to the {self.name} failed: {error.strerror}. {_MEND}"
            ) from error
        hasher = self._hasher()
        hasher.update(view)
        block.checksum = hasher.intdigest()

    def read(self, block: StorageBlock, into: Tensor) -> None:
        """See `Storage.read`.

        Raises:
            TierError: the disk failed, the file is shorter than it was, or its bytes are others than those written.
        """
        view = memoryview(into.numpy())  # type: ignore[arg-type]
        done, hasher = 0, self._hasher()
        while done < len(view):
            try:
                count = os.preadv(self._descriptor, [view[done : done + _PIECE]], block.offset + done)
            except OSError as error:
                raise TierError(f"reading from the {self.name} failed: {error.strerror}. {_MEND}") from error
            if count == 0:
                raise TierError(f"the {self.name} ends {format_bytes(len(view) - done)} too early. {_MEND}")
            hasher.update(view[done : done + count])  # while it is in the processor's cache
            done += count
        if hasher.intdigest() != block.checksum:
            raise TierError(f"the {self.name} gave back other bytes than were written. {_MEND}")


class SimulatedStorage:
    """A storage that stores nothing, for tensors that have no contents.

    Args:
        nbytes: its size.
    """

    def __init__(self, nbytes: int) -> None:
        self.ranges = RangeAllocator(nbytes)

    def write(self, block: StorageBlock, data: Tensor) -> None:
        """See `Storage.write`."""

    def read(self, block: StorageBlock, into: Tensor) -> None:
        """See `Storage.read`."""


_MEND = (
    "Parameters and optimizer are as they were; zero the gradients before the next step, and free some space on that "
    "disk or set offload_dir to another folder."
)
