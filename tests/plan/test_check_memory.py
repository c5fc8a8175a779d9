"""Checks of host memory, containers' limits, locked and shared memory, and open files, with made-up limits."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pytest

from trunkline.plan.checks import check_memory
from trunkline.utils import host_limits
from trunkline.utils.host_limits import MemoryLimit, memory_limit, usable_processors

GIB = 2**30
KERNEL_MAXIMUM = 9223372036854771712  # what cgroups v1 write for no limit


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Folders in place of /proc and /sys/fs/cgroup, and a function that says in which groups the process is."""

    def groups(*lines: str) -> Path:
        write(tmp_path / "proc/self/cgroup", "\n".join(lines))
        (tmp_path / "cgroup").mkdir(exist_ok=True)
        monkeypatch.setattr(host_limits, "PROC", tmp_path / "proc")
        monkeypatch.setattr(host_limits, "CGROUPS", tmp_path / "cgroup")
        return tmp_path / "cgroup"

    return groups


def test_limit_of_cgroups_v2(machine):
    root = machine("0::/job/step")
    write(root / "job/step/memory.max", "max")
    write(root / "job/memory.max", 8 * GIB)
    write(root / "job/memory.current", 5 * GIB)
    write(root / "job/memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert memory_limit() == MemoryLimit(8 * GIB, 3 * GIB)
    write(root / "job/step/memory.max", 6 * GIB)  # less, but nothing of it is used
    assert memory_limit() == MemoryLimit(8 * GIB, 3 * GIB)
    write(root / "job/step/memory.current", 2 * GIB)  # 4 GiB are left, 5 in the outer group
    assert memory_limit() == MemoryLimit(6 * GIB, 2 * GIB)


def test_limit_of_cgroups_v1(machine):
    root = machine("4:memory:/job", "1:cpu,cpuacct:/job", "0::/")
    write(root / "memory/job/memory.limit_in_bytes", KERNEL_MAXIMUM)
    write(root / "memory/memory.limit_in_bytes", KERNEL_MAXIMUM)
    assert memory_limit() is None
    write(root / "memory/job/memory.limit_in_bytes", 4 * GIB)
    write(root / "memory/job/memory.usage_in_bytes", 3 * GIB)
    write(root / "memory/job/memory.stat", f"inactive_file 7\ntotal_inactive_file {GIB}")
    assert memory_limit() == MemoryLimit(4 * GIB, 2 * GIB)


def test_a_container_that_sees_its_own_group_as_the_root(machine):
    root = machine("0::/../../docker/abc")
    write(root / "memory.max", 2 * GIB)
    write(root / "memory.current", GIB)
    assert memory_limit() == MemoryLimit(2 * GIB, GIB)


def test_without_cgroups_there_is_no_limit(monkeypatch, tmp_path):
    monkeypatch.setattr(host_limits, "PROC", tmp_path)
    assert memory_limit() is None


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
    root = machine(line)
    for name, text in files.items():
        write(root / name, text)
    assert usable_processors() == expected


def with_memory(monkeypatch, total: float, available: float, limit: MemoryLimit | None = None) -> None:
    sizes = SimpleNamespace(total=int(total * GIB), available=int(available * GIB))
    monkeypatch.setattr("psutil.virtual_memory", lambda: sizes)
    for module in (host_limits, check_memory):
        monkeypatch.setattr(module, "memory_limit", lambda: limit)


def test_host_memory_within_the_limit_of_the_container(monkeypatch):
    with_memory(monkeypatch, 64, 32)
    finding = check_memory.check_host_memory()
    assert (finding.state, finding.found) == ("ok", "32.0 GiB of 64.0 GiB available")
    # A limit counts where it is lower.
    with_memory(monkeypatch, 64, 32, MemoryLimit(16 * GIB, 6 * GIB))
    finding = check_memory.check_host_memory()
    assert finding.state == "ok"
    assert finding.found.startswith("10.0 GiB available, of 16.0 GiB that the container may hold (64.0 GiB")
    with_memory(monkeypatch, 64, 32, MemoryLimit(16 * GIB, 14 * GIB))
    finding = check_memory.check_host_memory()
    assert finding.state == "warn"
    assert "--memory" in finding.fix
    with_memory(monkeypatch, 64, 3)
    assert check_memory.check_host_memory().state == "warn"


@pytest.mark.parametrize(
    ("total", "used", "state", "text"),
    [(0, 0, "ok", "none"), (8, 0.5, "ok", "512.0 MiB of 8.0 GiB used"), (8, 2, "warn", "2.0 GiB of 8.0 GiB used")],
)
def test_swap(monkeypatch, total, used, state, text):
    swap = SimpleNamespace(total=total * GIB, used=int(used * GIB))
    monkeypatch.setattr("psutil.swap_memory", lambda: swap)
    finding = check_memory.check_swap()
    assert (finding.state, finding.found) == (state, text)


def with_limits(monkeypatch, kind: int, soft: int, hard: int = 2**20) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: {kind: (soft, hard)}[what])


def test_limited_locked_memory_matters_with_a_gpu(monkeypatch):
    with_limits(monkeypatch, resource.RLIMIT_MEMLOCK, resource.RLIM_INFINITY)
    assert check_memory.check_locked_memory(cuda=True).state == "ok"
    with_limits(monkeypatch, resource.RLIMIT_MEMLOCK, 8 * 2**20)
    finding = check_memory.check_locked_memory(cuda=True)
    assert finding.state == "warn"
    assert "8.0 MiB" in finding.found
    assert "memlock" in finding.fix
    assert check_memory.check_locked_memory(cuda=False).state == "ok"


@pytest.mark.parametrize(("free_mib", "state"), [(64, "warn"), (1023, "warn"), (1024, "ok")])
def test_shared_memory(tmp_path, monkeypatch, free_mib, state):
    room = SimpleNamespace(total=2 * free_mib * 2**20, free=free_mib * 2**20)
    monkeypatch.setattr("psutil.disk_usage", lambda folder: room)
    monkeypatch.setattr(check_memory, "SHARED", tmp_path)
    finding = check_memory.check_shared_memory()
    assert finding.state == state
    assert str(tmp_path) in finding.found
    if state == "warn":
        assert "--shm-size" in finding.fix


def test_missing_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(check_memory, "SHARED", tmp_path / "nowhere")
    finding = check_memory.check_shared_memory()
    assert finding.state == "warn"
    assert "does not exist" in finding.found


def test_open_files(monkeypatch):
    with_limits(monkeypatch, resource.RLIMIT_NOFILE, 1024, 4096)
    assert check_memory.check_open_files().state == "ok"
    with_limits(monkeypatch, resource.RLIMIT_NOFILE, resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert check_memory.check_open_files().found == "no limit"
    with_limits(monkeypatch, resource.RLIMIT_NOFILE, 256, 4096)
    finding = check_memory.check_open_files()
    assert (finding.state, finding.found) == ("warn", "at most 256")
    assert "allows 4,096" in finding.fix
    with_limits(monkeypatch, resource.RLIMIT_NOFILE, 256, 1_048_576)
    assert "allows" not in check_memory.check_open_files().fix
