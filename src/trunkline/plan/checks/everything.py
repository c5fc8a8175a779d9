"""All checks, by section, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trunkline.plan.checks import disk, environment, memory, software
from trunkline.plan.checks.cgroup import memory_limit, usable_processors
from trunkline.plan.checks.finding import Check, Finding, attempt

_APART = ("torch", "transformers")  # required packages with lines of their own


def examine(folder: Path) -> Iterator[tuple[str, Finding]]:
    """Run every check.

    Args:
        folder: whose disk is measured.

    Yields:
        The title of a section, and one of its findings.
    """
    yield from _section("Software", _software())
    devices, num_gpus = _devices()
    yield from _section("Devices", devices)
    yield from _section("Memory", _memory(num_gpus > 0))
    yield from _section("Disk", _disk(folder))
    yield from _section("Processes", _processes(num_gpus))
    for finding in _environment(num_gpus):
        yield "Environment", finding
    yield from _section(
        "Optional packages", [Check(name, partial(software.optional, name)) for name in software.OPTIONAL]
    )


def _section(title: str, checks: list[Check]) -> Iterator[tuple[str, Finding]]:
    return ((title, attempt(check)) for check in checks)


def _software() -> list[Check]:
    return [
        Check("python", software.python_version),
        *(Check(name, partial(software.required, name)) for name in _APART),
        Check("other packages", partial(software.other_required, _APART)),
        Check("compiler", software.compiler),
    ]


def _devices() -> tuple[list[Check], int]:
    """Checks of devices, and how many of CUDA there are.

    PyTorch is imported here, not above: where it is what is broken, the other lines still say what is well.
    """
    try:
        from trunkline.plan.checks import attention, device, link

        found = device.devices()
    except Exception as error:
        return [Check("device", partial(_raise, error))], 0
    gpus = [d for d in found if d.type == "cuda"]
    checks = [
        *(Check(f"device {gpu}", partial(device.gpu, gpu)) for gpu in gpus),
        *([] if gpus else [Check("device cpu", lambda: device.processor(usable_processors()))]),
        *(Check(f"attention {short}", partial(attention.attention, short, found[0])) for short in attention.DTYPES),
        *(Check(f"link {d}" if gpus else "link", partial(link.link, d)) for d in found),
        *([Check("triton", software.triton)] if gpus else []),
    ]
    return checks, len(gpus)


def _raise(error: Exception) -> Finding:
    raise error


def _memory(cuda: bool) -> list[Check]:
    return [
        Check("host memory", lambda: memory.host_memory(limit=memory_limit())),
        Check("swap", memory.swap),
        Check("locked memory", partial(memory.lock_limit, cuda)),
        Check("shared memory", memory.shared_memory),
    ]


def _disk(folder: Path) -> list[Check]:
    room = Check("disk", partial(disk.disk_room, folder))
    # Where no file can be made, the first line says why.
    return [room, Check("disk speed", partial(disk.disk_speed, folder))] if disk.can_write(folder) else [room]


def _processes(num_gpus: int) -> list[Check]:
    def ranks() -> Finding:
        from trunkline.plan.checks.ranks import ranks

        return ranks(num_gpus)

    return [Check("ranks", ranks), Check("open files", memory.open_files)]


def _environment(num_gpus: int) -> list[Finding]:
    """As many findings as variables that matter."""
    found: list[Finding] = []

    def look() -> Finding:
        found.extend(environment.variables(environment.Machine(usable_processors(), num_gpus)))
        return found[0]

    return [attempt(Check(environment.NAME, look)), *found[1:]]
