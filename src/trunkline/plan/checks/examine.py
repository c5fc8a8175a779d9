"""All checks of this machine, by section, in the order in which they are read."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trunkline.plan.checks import Check, Finding, attempt, check_disk, check_environment, check_memory, check_software

_ON_THEIR_OWN = ("torch", "transformers")  # required packages with lines of their own


def examine(folder: Path) -> Iterator[tuple[str, Finding]]:
    """Run every check.

    PyTorch is first imported inside a check: where it is broken, the other lines still say what is well.

    Args:
        folder: folder whose disk is measured.

    Yields:
        The title of a section, and one of its findings.
    """
    num_gpus = 0

    def devices() -> list[Finding]:
        nonlocal num_gpus
        from trunkline.plan.checks import check_devices

        devices = check_devices.devices()
        num_gpus = sum(device.type == "cuda" for device in devices)
        return check_devices.check_all(devices)

    def ranks() -> Finding:
        from trunkline.plan.checks import check_devices

        return check_devices.check_ranks(num_gpus)

    sections: dict[str, dict[str, Check]] = {
        "Software": {
            "python": check_software.check_python,
            **{name: partial(check_software.check_required, name) for name in _ON_THEIR_OWN},
            "other packages": partial(check_software.check_other_required, _ON_THEIR_OWN),
            "compiler": check_software.check_compiler,
        },
        "Devices": {"device": devices},
        "Memory": {
            "host memory": check_memory.check_host_memory,
            "swap": check_memory.check_swap,
            "locked memory": lambda: check_memory.check_locked_memory(num_gpus > 0),
            "shared memory": check_memory.check_shared_memory,
        },
        "Disk": {"disk": partial(check_disk.check_disk, folder)},
        "Processes": {"ranks": ranks, "open files": check_memory.check_open_files},
        "Environment": {"environment": lambda: check_environment.check_variables(num_gpus)},
        "Optional packages": {name: partial(check_software.check_optional, name) for name in check_software.OPTIONAL},
    }
    for title, checks in sections.items():
        for name, check in checks.items():
            yield from ((title, finding) for finding in attempt(name, check))
