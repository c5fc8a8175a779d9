"""Checks of the disk: room, filesystem and speed. A measurement leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trunkline.plan.checks import check_disk

MIB = 2**20


@pytest.fixture
def mounts(tmp_path, monkeypatch):
    kinds = {"/": "ext4", f"{tmp_path}": "xfs", f"{tmp_path}/ram": "tmpfs", f"{tmp_path}/two words": "nfs4"}
    partitions = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in kinds.items()]
    partitions += [SimpleNamespace(mountpoint=f"{tmp_path}/twice", fstype=kind) for kind in ("ext2", "btrfs")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: partitions)


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("", "xfs"), ("deep/er", "xfs"), ("ram/x", "tmpfs"), ("ramp", "xfs"), ("two words", "nfs4"), ("twice", "btrfs")],
)
def test_filesystem_is_that_of_the_innermost_mount(tmp_path, mounts, folder, kind):
    assert check_disk.filesystem_of(tmp_path / folder) == kind
    assert check_disk.filesystem_of(Path("/")) == "ext4"


@pytest.fixture
def measured(monkeypatch):
    """Sizes of the files that were measured; every disk is fast."""
    sizes = []
    monkeypatch.setattr(
        check_disk, "measure_disk", lambda folder, nbytes: (sizes.append(nbytes), (2e9, 3e9, nbytes))[1]
    )
    return sizes


def with_free(monkeypatch, nbytes: int) -> None:
    monkeypatch.setattr("psutil.disk_usage", lambda folder: SimpleNamespace(free=nbytes))


def test_little_room_is_a_warning(tmp_path, mounts, measured, monkeypatch):
    with_free(monkeypatch, 100 * 2**30)
    room, _ = check_disk.check_disk(tmp_path)
    assert (room.state, room.found) == ("ok", f"100.0 GiB free in {tmp_path} (xfs)")
    with_free(monkeypatch, 9 * 2**30)
    room, _ = check_disk.check_disk(tmp_path)
    assert (room.state, room.found) == ("warn", f"9.0 GiB free in {tmp_path} (xfs)")


def test_a_folder_in_memory_is_a_warning(tmp_path, mounts, measured, monkeypatch):
    with_free(monkeypatch, 100 * 2**30)
    (tmp_path / "ram").mkdir()
    room, _ = check_disk.check_disk(tmp_path / "ram")
    assert room.state == "warn"
    assert "(tmpfs), which is memory" in room.found


def test_a_folder_that_cannot_be_used_fails_and_is_not_measured(tmp_path, monkeypatch):
    (finding,) = check_disk.check_disk(tmp_path / "nowhere")
    assert finding.state == "fail"
    assert "is not a folder" in finding.found
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (finding,) = check_disk.check_disk(tmp_path)
    assert finding.state == "fail"
    assert "cannot be written to" in finding.found


def test_speed_is_measured_on_the_disk_not_in_the_page_cache(tmp_path, monkeypatch):
    calls = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def called(*arguments):
            assert os.listdir(tmp_path) == []  # the file has no name
            result = real(*arguments)
            calls.append((name, arguments, result))
            return result

        monkeypatch.setattr(os, name, called)

    for name in ("pwrite", "fdatasync", "fsync", "posix_fadvise", "preadv"):
        spy(name)
    write, read, nbytes = check_disk.measure_disk(tmp_path, 32 * MIB, seconds=60)
    assert nbytes == 32 * MIB
    assert sum(result for name, _, result in calls if name == "pwrite") == 32 * MIB
    assert sum(result for name, _, result in calls if name == "preadv") == 32 * MIB
    order = [name for name, _, _ in calls]
    assert order[: order.index("preadv")] == [*["pwrite", "fdatasync"] * 2, "fsync", "posix_fadvise"]
    (advice,) = (arguments for name, arguments, _ in calls if name == "posix_fadvise")
    assert advice[1:] == (0, 0, os.POSIX_FADV_DONTNEED)
    assert write > 0
    assert read > 0


def test_a_slow_disk_ends_early(tmp_path, monkeypatch):
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (time.sleep(0.2), real(descriptor)))
    write, _, nbytes = check_disk.measure_disk(tmp_path, 1024 * MIB, seconds=0.3)
    assert nbytes <= 32 * MIB  # two pieces: the second begins at 0.2 s, no third after 0.4
    assert write < 16 * MIB / 0.2


@pytest.mark.parametrize(
    ("write", "read", "state"), [(2e9, 3e9, "ok"), (0.5e9, 0.5e9, "ok"), (0.49e9, 3e9, "warn"), (2e9, 0.1e9, "warn")]
)
def test_a_slow_disk_is_a_warning(write, read, state, tmp_path, monkeypatch):
    monkeypatch.setattr(check_disk, "measure_disk", lambda folder, nbytes: (write, read, nbytes))
    finding = check_disk.check_speed(tmp_path, 2**30)
    assert finding.state == state
    assert finding.found.startswith(f"writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s (256.0 MiB")


def test_the_file_takes_at_most_half_of_the_free_space(tmp_path, measured):
    assert check_disk.check_speed(tmp_path, 100 * MIB).state == "ok"
    check_disk.check_speed(tmp_path, 100 * 2**30)
    assert measured == [50 * MIB, 256 * MIB]
    finding = check_disk.check_speed(tmp_path, 20 * MIB)
    assert (finding.state, finding.found) == ("warn", "not measured, with 20.0 MiB free")
    assert len(measured) == 2


def test_a_killed_measurement_leaves_nothing(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from trunkline.plan.checks import check_disk\n"
        "real = os.fdatasync\n"
        "os.fdatasync = lambda descriptor: (real(descriptor), print('written', flush=True))\n"
        "check_disk.measure_disk(Path(sys.argv[1]), 2**40, seconds=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
