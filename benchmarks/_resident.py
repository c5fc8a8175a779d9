"""Resident set of a process (Linux), measured in a fresh process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _variants import Setup

# malloc returns freed memory to the kernel at once, for every variant. Otherwise the resident set includes memory that
# malloc holds back and the step does not need. There is one arena, because each arena holds memory back.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def in_own_process(script: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run a script with a task as its argument.

    Args:
        script: file of the script; its last line of output is the answer.
        task: argument, as a JSON object.

    Returns:
        The answer. If the process was killed, as happens out of memory, `failed` with the reason.
    """
    child = subprocess.run(
        [sys.executable, script, json.dumps(task)],
        env={**os.environ, **MALLOC},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if child.returncode == -9:
        return {"failed": "killed: out of memory"}
    child.check_returncode()
    found: dict[str, Any] = json.loads(child.stdout.splitlines()[-1])
    return found


def answered(trial: Callable[..., dict[str, Any]]) -> bool:
    """Run the task and print its answer if `in_own_process` started this process; otherwise return False."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        return False
    task = json.loads(sys.argv[1])
    print(json.dumps(trial(Setup(**task.pop("setup")), **task)))
    return True


def status(field: str) -> int:
    """Return a field of this process's status in bytes, such as `VmRSS` (resident set) or `VmHWM` (its peak)."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"this kernel does not report {field}"
    return int(match[1]) * 1024


def reset_peak() -> None:
    """Reset `VmHWM` to the current resident set."""
    Path("/proc/self/clear_refs").write_text("5")
