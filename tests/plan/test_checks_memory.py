"""Host memory, limits of containers, locked and shared memory, open files: each from files and limits made up here."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from trunkline.plan.checks import memory
from trunkline.plan.checks.cgroup import MemoryLimit, memory_limit, usable_processors

GIB = 2**30
KERNEL_MAXIMUM = 9223372036854771712  # what cgroups v1 write for no limit


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path):
    """Folders in place of /proc and /sys/fs/cgroup, and a function that says in which groups the process is."""

    def groups(*lines: str) -> tuple[Path, Path]:
        write(tmp_path / "proc/self/cgroup", "\n".join(lines))
        (tmp_path / "cgroup").mkdir(exist_ok=True)
        return tmp_path / "proc", tmp_path / "cgroup"

    return groups


def test_limit_of_cgroups_v2(machine):
    proc, root = machine("0::/job/step")
    write(root / "job/step/memory.max", "max")
    write(root / "job/memory.max", 8 * GIB)
    write(root / "job/memory.current", 5 * GIB)
    write(root / "job/memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert memory_limit(proc, root) == MemoryLimit(8 * GIB, 3 * GIB)
    write(root / "job/step/memory.max", 6 * GIB)  # less, but nothing of it is used
    assert memory_limit(proc, root) == MemoryLimit(8 * GIB, 3 * GIB)
    write(root / "job/step/memory.current", 2 * GIB)  # 4 GiB are left, 5 in the outer group
    assert memory_limit(proc, root) == MemoryLimit(6 * GIB, 2 * GIB)


def test_limit_of_cgroups_v1(machine):
    proc, root = machine("4:memory:/job", "1:cpu,cpuacct:/job", "0::/")
    write(root / "memory/job/memory.limit_in_bytes", KERNEL_MAXIMUM)
    write(root / "memory/memory.limit_in_bytes", KERNEL_MAXIMUM)
    assert memory_limit(proc, root) is None
    write(root / "memory/job/memory.limit_in_bytes", 4 * GIB)
    write(root / "memory/job/memory.usage_in_bytes", 3 * GIB)
    write(root / "memory/job/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}")
    assert memory_limit(proc, root) == MemoryLimit(4 * GIB, 2 * GIB)


def test_a_container_that_sees_its_own_group_as_the_root(machine):
    proc, root = machine("0::/../../docker/abc")
    write(root / "memory.max", 2 * GIB)
    write(root / "memory.current", GIB)
    assert memory_limit(proc, root) == MemoryLimit(2 * GIB, GIB)


def test_no_groups_at_all(tmp_path):
    assert memory_limit(tmp_path, tmp_path) is None


@pytest.mark.parametrize(
    ("files", "line", "expected"),
    [
        ({"job/cpu.max": "150000 100000"}, "0::/job", 2),
        ({"job/cpu.max": "max 100000", "cpu.max": "100000 100000"}, "0::/job", 1),
        ({"job/cpu.max": "max 100000"}, "0::/job", 8),
        ({"job/cpu.max": "1600000 100000"}, "0::/job", 8),
        ({"cpu,cpuacct/j/cpu.cfs_quota_us": 50000, "cpu,cpuacct/j/cpu.cfs_period_us": 100000}, "1:cpu,cpuacct:/j", 1),
        ({"cpu/j/cpu.cfs_quota_us": -1, "cpu/j/cpu.cfs_period_us": 100000}, "1:cpu:/j", 8),
    ],
)
def test_usable_processors(machine, monkeypatch, files, line, expected):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    proc, root = machine(line)
    for name, text in files.items():
        write(root / name, text)
    assert usable_processors(proc, root) == expected


def meminfo(tmp_path, **gib: float) -> Path:
    path = tmp_path / "meminfo"
    write(path, "\n".join([*(f"{name}: {int(size * 2**20)} kB" for name, size in gib.items()), "HugePages_Total: 0"]))
    return path


def test_host_memory(tmp_path):
    path = meminfo(tmp_path, MemTotal=64, MemAvailable=32)
    found = memory.host_memory(path)
    assert (found.state, found.found) == ("ok", "32.0 GiB of 64.0 GiB available")
    # A limit is what counts, where it is lower.
    found = memory.host_memory(path, MemoryLimit(16 * GIB, 6 * GIB))
    assert found.state == "ok"
    assert found.found.startswith("10.0 GiB available, of 16.0 GiB that the container may hold (64.0 GiB")
    found = memory.host_memory(path, MemoryLimit(16 * GIB, 14 * GIB))
    assert found.state == "warn"
    assert "--memory" in found.mend
    assert memory.host_memory(path, MemoryLimit(128 * GIB, 127 * GIB)).state == "ok"
    assert memory.host_memory(meminfo(tmp_path, MemTotal=64, MemAvailable=3)).state == "warn"


@pytest.mark.parametrize(
    ("total", "free", "state", "text"),
    [(0, 0, "ok", "none"), (8, 7.5, "ok", "512.0 MiB of 8.0 GiB used"), (8, 6, "warn", "2.0 GiB of 8.0 GiB used")],
)
def test_swap(tmp_path, total, free, state, text):
    found = memory.swap(meminfo(tmp_path, SwapTotal=total, SwapFree=free))
    assert (found.state, found.found) == (state, text)


def test_locked_memory(monkeypatch):
    assert memory.lock_limit(cuda=True, limit=resource.RLIM_INFINITY).state == "ok"
    found = memory.lock_limit(cuda=True, limit=8 * 2**20)
    assert found.state == "warn"
    assert "8.0 MiB" in found.found
    assert "memlock" in found.mend
    assert memory.lock_limit(cuda=False, limit=8 * 2**20).state == "ok"
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_MEMLOCK: (4096, 8192)}[what])
    assert "4.0 KiB" in memory.lock_limit(cuda=True).found


@pytest.mark.parametrize(("free_mib", "state"), [(64, "warn"), (1023, "warn"), (1024, "ok")])
def test_shared_memory(tmp_path, monkeypatch, free_mib, state):
    room = SimpleNamespace(f_blocks=2 * free_mib, f_bavail=free_mib, f_frsize=2**20)
    monkeypatch.setattr(os, "statvfs", lambda folder: room)
    found = memory.shared_memory(tmp_path)
    assert found.state == state
    assert str(tmp_path) in found.found
    if state == "warn":
        assert "--shm-size" in found.mend


def test_no_shared_memory(tmp_path):
    found = memory.shared_memory(tmp_path / "nowhere")
    assert found.state == "warn"
    assert "does not exist" in found.found


def test_open_files(monkeypatch):
    assert memory.open_files((1024, 4096)).state == "ok"
    assert memory.open_files((resource.RLIM_INFINITY, resource.RLIM_INFINITY)).found == "no limit"
    found = memory.open_files((256, 4096))
    assert (found.state, found.found) == ("warn", "at most 256")
    assert "allows 4,096" in found.mend
    assert "allows" not in memory.open_files((256, 1_048_576)).mend
    monkeypatch.setattr(resource, "getrlimit", lambda what: {resource.RLIMIT_NOFILE: (77, 88)}[what])
    assert memory.open_files().found == "at most 77"
