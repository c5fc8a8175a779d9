"""The disk: room, kind and speed; what is measured leaves nothing behind, however it ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trunkline.plan.checks import disk

MIB = 2**20


@pytest.fixture
def mountinfo(tmp_path):
    lines = [
        "22 27 0:21 / / rw,relatime shared:1 - ext4 /dev/vda rw",
        f"23 22 0:22 / {tmp_path} rw - xfs /dev/vdb rw",
        f"24 23 0:23 / {tmp_path}/ram rw shared:3 master:1 - tmpfs tmpfs rw,size=1k",
        f"25 23 0:24 / {tmp_path}/two\\040words rw - nfs4 server:/x rw",
        f"26 23 0:25 / {tmp_path}/twice rw - ext2 /dev/vdc rw",
        f"27 26 0:26 / {tmp_path}/twice rw - btrfs /dev/vdd rw",
    ]
    (tmp_path / "mountinfo").write_text("\n".join(lines) + "\n")
    return tmp_path / "mountinfo"


@pytest.mark.parametrize(
    ("folder", "kind"),
    [("", "xfs"), ("deep/er", "xfs"), ("ram/x", "tmpfs"), ("ramp", "xfs"), ("two words", "nfs4"), ("twice", "btrfs")],
)
def test_filesystem(tmp_path, mountinfo, folder, kind):
    assert disk.filesystem_of(tmp_path / folder, mountinfo) == kind
    assert disk.filesystem_of(Path("/"), mountinfo) == "ext4"


def with_free(monkeypatch, nbytes: int) -> None:
    monkeypatch.setattr(os, "statvfs", lambda folder: SimpleNamespace(f_bavail=nbytes // 4096, f_frsize=4096))


def test_room(tmp_path, mountinfo, monkeypatch):
    with_free(monkeypatch, 100 * 2**30)
    found = disk.disk_room(tmp_path, mountinfo)
    assert (found.state, found.found) == ("ok", f"100.0 GiB free in {tmp_path} (xfs)")
    with_free(monkeypatch, 9 * 2**30)
    found = disk.disk_room(tmp_path, mountinfo)
    assert (found.state, found.found) == ("warn", f"9.0 GiB free in {tmp_path} (xfs)")


def test_memory_is_no_disk(tmp_path, mountinfo, monkeypatch):
    with_free(monkeypatch, 100 * 2**30)
    (tmp_path / "ram").mkdir()
    found = disk.disk_room(tmp_path / "ram", mountinfo)
    assert found.state == "warn"
    assert "(tmpfs), which is memory" in found.found


def test_a_folder_that_is_none(tmp_path, monkeypatch):
    found = disk.disk_room(tmp_path / "nowhere")
    assert found.state == "fail"
    assert "is not a folder" in found.found
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = disk.disk_room(tmp_path)
    assert found.state == "fail"
    assert "cannot be written to" in found.found


def test_speed_is_of_what_was_written_synced_and_forgotten(tmp_path, monkeypatch):
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
    speed = disk.measure_disk(tmp_path, 32 * MIB, seconds=60)
    assert speed.nbytes == 32 * MIB
    assert sum(result for name, _, result in calls if name == "pwrite") == 32 * MIB
    assert sum(result for name, _, result in calls if name == "preadv") == 32 * MIB
    order = [name for name, _, _ in calls]
    assert order[: order.index("preadv")] == [*["pwrite", "fdatasync"] * 2, "fsync", "posix_fadvise"]
    (advice,) = (arguments for name, arguments, _ in calls if name == "posix_fadvise")
    assert advice[1:] == (0, 0, os.POSIX_FADV_DONTNEED)
    assert speed.write > 0
    assert speed.read > 0


def test_a_slow_disk_ends_early(tmp_path, monkeypatch):
    real = os.fdatasync
    monkeypatch.setattr(os, "fdatasync", lambda descriptor: (time.sleep(0.2), real(descriptor)))
    speed = disk.measure_disk(tmp_path, 1024 * MIB, seconds=0.3)
    assert speed.nbytes <= 32 * MIB  # two pieces: the second begins at 0.2 s, no third after 0.4
    assert speed.write < 16 * MIB / 0.2


@pytest.mark.parametrize(
    ("write", "read", "state"), [(2e9, 3e9, "ok"), (0.5e9, 0.5e9, "ok"), (0.49e9, 3e9, "warn"), (2e9, 0.1e9, "warn")]
)
def test_what_a_speed_means(write, read, state):
    found = disk.judge_disk(disk.DiskSpeed(write, read, 256 * MIB))
    assert found.state == state
    assert f"writes {write / 1e9:.2f} GB/s, reads {read / 1e9:.2f} GB/s" in found.found


def test_the_file_takes_at_most_half_of_what_is_free(tmp_path, monkeypatch):
    with_free(monkeypatch, 100 * MIB)
    asked = []
    monkeypatch.setattr(disk, "measure_disk", lambda folder, nbytes: (asked.append(nbytes), speed)[1])
    speed = disk.DiskSpeed(1e9, 1e9, 1)
    assert disk.disk_speed(tmp_path).state == "ok"
    with_free(monkeypatch, 100 * 2**30)
    disk.disk_speed(tmp_path)
    assert asked == [50 * MIB, 256 * MIB]
    with_free(monkeypatch, 20 * MIB)
    found = disk.disk_speed(tmp_path)
    assert (found.state, found.found) == ("warn", "not measured, with 20.0 MiB free")
    assert len(asked) == 2


def test_a_killed_measurement_leaves_nothing(tmp_path):
    code = (
        "import os, sys; from pathlib import Path; from trunkline.plan.checks import disk\n"
        "real = os.fdatasync\n"
        "os.fdatasync = lambda descriptor: (real(descriptor), print('written', flush=True))\n"
        "disk.measure_disk(Path(sys.argv[1]), 2**40, seconds=60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "written\n"
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL
    process.stdout.close()
    assert list(tmp_path.iterdir()) == []
