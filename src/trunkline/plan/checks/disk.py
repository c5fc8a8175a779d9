"""Checks of the disk that chunks would move to: room, kind of filesystem, and speed as a scratch file has it."""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from trunkline.plan.checks.finding import Finding
from trunkline.units import format_bytes

_FILE = 256 * 2**20  # bytes; more is not written than half a second of a fast disk
_PIECE = 16 * 2**20  # bytes; a chunk of 4,096 tokens of a small model
_SECONDS = 1.2  # of each direction; a slow disk is measured with less
_ROOM = 10 * 2**30  # bytes; an 8B model keeps 0.5 MiB a token, so that this is 20,000 tokens
_SLOW = 500 * 10**6  # bytes a second; a SATA disk. NVMe disks make several times that
_MEMORY = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Sequential speed of a disk.

    Attributes:
        write: bytes a second, until they are on the disk.
        read: bytes a second, not from the page cache where the filesystem can be made to forget it.
        nbytes: how many were measured.
    """

    write: float
    read: float
    nbytes: int


def measure_disk(folder: Path, nbytes: int = _FILE, seconds: float = _SECONDS) -> DiskSpeed:
    """Write and read a file that has no name, so that nothing stays behind, however this ends.

    Args:
        folder: on the disk.
        nbytes: of the file, in full pieces of 16 MiB; at least one is written.
        seconds: after which each direction ends early.

    Raises:
        OSError: no file can be made there, or there is no room.
    """
    piece = os.urandom(_PIECE)  # neither compressed nor found to be all zeros
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        descriptor, done = file.fileno(), 0
        start = time.perf_counter()
        while done == 0 or (done + _PIECE <= nbytes and time.perf_counter() - start < seconds):
            written = 0
            while written < _PIECE:
                written += os.pwrite(descriptor, memoryview(piece)[written:], done + written)
            os.fdatasync(descriptor)  # each piece, so that a slow disk is not met with all of them at the end
            done += _PIECE
        write = done / (time.perf_counter() - start)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        into, read = bytearray(_PIECE), 0
        start = time.perf_counter()
        while read < done and (read == 0 or time.perf_counter() - start < seconds):
            read += os.preadv(descriptor, [into], read)
        return DiskSpeed(write, read / (time.perf_counter() - start), done)


def filesystem_of(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> str:
    """The type of the filesystem of a folder, such as `ext4`.

    Args:
        folder: an existing one.
        mountinfo: the kernel's list of mounts (proc_pid_mountinfo(5)).
    """
    resolved, best, kind = folder.resolve(), -1, "unknown"
    for line in mountinfo.read_text().splitlines():
        before, _, after = line.partition(" - ")
        point = Path(before.split()[4].encode().decode("unicode_escape"))
        if resolved.is_relative_to(point) and len(point.parts) >= best:  # of two at one place the later is on top
            best, kind = len(point.parts), after.split()[0]
    return kind


def can_write(folder: Path) -> bool:
    """Whether a file can be made in a folder."""
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def disk_room(folder: Path, mountinfo: Path = Path("/proc/self/mountinfo")) -> Finding:
    """Whether a scratch file could be made in a folder, and how large.

    Args:
        folder: that `disk` would name.
        mountinfo: the kernel's list of mounts.
    """
    if not folder.is_dir():
        return Finding("disk", "fail", f"{folder} is not a folder", "Give an existing folder to --disk.")
    if not can_write(folder):
        mend = "Give a folder of yours to --disk, or have its owner change its permissions."
        return Finding("disk", "fail", f"{folder} cannot be written to", mend)
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    kind = filesystem_of(folder, mountinfo)
    text = f"{format_bytes(free)} free in {folder} ({kind})"
    if kind in _MEMORY:
        mend = "What is put there takes host memory: give a folder on a disk, to --disk here and as disk in training."
        return Finding("disk", "warn", f"{text}, which is memory, not a disk", mend)
    if free < _ROOM:
        mend = "Free some space, or give a folder on a larger disk, to --disk here and as disk in training."
        return Finding("disk", "warn", text, mend)
    return Finding("disk", "ok", text)


def disk_speed(folder: Path) -> Finding:
    """How fast chunks would move to a scratch file in a folder, and back.

    Args:
        folder: that `disk` would name.

    Raises:
        OSError: it cannot be written to; `disk_room` says so in its own words.
    """
    room = os.statvfs(folder)
    free = room.f_bavail * room.f_frsize
    if free < 2 * _PIECE:
        mend = "Free some space, or give another folder to --disk."
        return Finding("disk speed", "warn", f"not measured, with {format_bytes(free)} free", mend)
    return judge_disk(measure_disk(folder, min(_FILE, free // 2)))


def judge_disk(speed: DiskSpeed) -> Finding:
    """What a speed means for training.

    Args:
        speed: as it was measured.
    """
    text = f"writes {speed.write / 1e9:.2f} GB/s, reads {speed.read / 1e9:.2f} GB/s"
    text += f" ({format_bytes(speed.nbytes)} measured)"
    if min(speed.write, speed.read) >= _SLOW:
        return Finding("disk speed", "ok", text)
    return Finding(
        "disk speed",
        "warn",
        text,
        "Where disk is set, compute will wait for it: give a folder on a local NVMe disk, or larger budgets of memory.",
    )
