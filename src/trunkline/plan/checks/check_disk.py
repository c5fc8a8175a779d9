"""Checks of the disk that chunks would move to: room, kind of filesystem, and sequential speed."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import psutil

from trunkline.plan.checks import Finding, attempt, judge
from trunkline.units import format_bytes

_FILE = 256 * 2**20  # bytes; more is not written than half a second of a fast disk
_BLOCK = 16 * 2**20  # bytes; a chunk of 4,096 tokens of a small model
_SECONDS = 1.2  # of each direction; a slow disk is measured with less
_ROOM = 10 * 2**30  # bytes; an 8B model keeps 0.5 MiB a token, so that this is 20,000 tokens
_SLOW = 500 * 10**6  # bytes a second; a SATA disk. NVMe disks make several times that


def measure_disk(folder: Path, nbytes: int = _FILE, seconds: float = _SECONDS) -> tuple[float, float, int]:
    """Measure the sequential speed of a disk.

    The file has no name, so that nothing stays behind, however this ends.

    Args:
        folder: folder on the disk.
        nbytes: most bytes to write, in full blocks of 16 MiB; at least one block is written.
        seconds: seconds after which each direction ends early.

    Returns:
        Bytes a second that reach the disk, bytes a second read (not from the page cache, where the filesystem can be
        made to forget it), and the bytes that were measured.

    Raises:
        OSError: no file can be made there, or there is no room.
    """
    data = os.urandom(_BLOCK)  # neither compressed nor found to be all zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor, done = file.fileno(), 0
        start = time.perf_counter()
        while done == 0 or (done + _BLOCK <= nbytes and time.perf_counter() - start < seconds):
            done += os.pwrite(descriptor, data, done)
            os.fdatasync(descriptor)  # each block, so that a slow disk is not met with all of them at the end
        write = done / (time.perf_counter() - start)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)  # drop the page cache, or it would answer the reads
        into, read = bytearray(_BLOCK), 0
        start = time.perf_counter()
        while read < done and (read == 0 or time.perf_counter() - start < seconds):
            read += os.preadv(descriptor, [into], read)
        return write, read / (time.perf_counter() - start), done


def filesystem_of(folder: Path) -> str:
    """Return the type of the filesystem of a folder, such as `ext4`; `unknown` if no mount holds it."""
    mounts = [m for m in psutil.disk_partitions(all=True) if folder.resolve().is_relative_to(m.mountpoint)]
    # max takes the first of equals: reversed, so that of two mounts at one place the later, which is on top, counts.
    return max(reversed(mounts), key=lambda m: len(m.mountpoint)).fstype if mounts else "unknown"


def check_disk(folder: Path) -> list[Finding]:
    """Check the room of a folder for a scratch file, then the speed of its disk.

    The only finding fails if the folder does not exist or cannot be written to. Otherwise the first one warns of a
    filesystem in memory, and of less than 10 GiB free; the second is that of `check_speed`.

    Args:
        folder: folder that `offload_dir` would name.
    """
    if not folder.is_dir():
        return [Finding("disk", "fail", f"{folder} is not a folder", "Give an existing folder to --disk.")]
    if not os.access(folder, os.W_OK | os.X_OK):
        permit = "Give a folder of yours to --disk, or have its owner change its permissions."
        return [Finding("disk", "fail", f"{folder} cannot be written to", permit)]
    free, kind = psutil.disk_usage(str(folder)).free, filesystem_of(folder)
    text, fix = f"{format_bytes(free)} free in {folder} ({kind})", None
    elsewhere = "to --disk here and as offload_dir in training."
    if kind in ("tmpfs", "ramfs"):
        text, fix = f"{text}, which is memory, not a disk", f"Give a folder on a disk, {elsewhere}"
    elif free < _ROOM:
        fix = f"Free some space, or give a folder on a larger disk, {elsewhere}"
    return [judge("disk", text, fix), *attempt("disk speed", lambda: check_speed(folder, free))]


def check_speed(folder: Path, free: int) -> Finding:
    """Measure how fast chunks would move to a scratch file in a folder, and back.

    The finding warns if either direction is below 500 MB/s, or if there is no room to measure.

    Args:
        folder: folder that `offload_dir` would name.
        free: free bytes there; the file takes at most half of them.
    """
    if free < 2 * _BLOCK:
        return judge("disk speed", f"not measured, with {format_bytes(free)} free", "Free some space there.")
    write, read, nbytes = measure_disk(folder, min(_FILE, free // 2))
    text = f"writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s ({format_bytes(nbytes)} measured)"
    fix = "With offload_dir compute will wait for it: give a folder on a local NVMe disk, or larger budgets of memory."
    return judge("disk speed", text, fix if min(write, read) < _SLOW else None)
