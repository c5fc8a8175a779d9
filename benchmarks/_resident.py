"""Resident set of a process (Linux), and fresh processes to measure it in."""

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

# Freed memory goes back to the kernel at once, for every variant alike: otherwise the resident set shows what malloc
# hoards and not what the step needs. One arena, because hoards are per arena.
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_ARENA_MAX": "1"}


def in_own_process(script: str, task: dict[str, Any]) -> dict[str, Any]:
    """Run a script with a task as its argument.

    Args:
        script: its file; its last line of output is its answer.
        task: what JSON can say.

    Returns:
        The answer; if the process was killed, which is how running out of memory looks, `failed` with the reason.
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
    """Do the task and print its answer in a process that `in_own_process` started; return False in any other."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("{"):
        return False
    task = json.loads(sys.argv[1])
    print(json.dumps(trial(Setup(**task.pop("setup")), **task)))
    return True


def status(field: str) -> int:
    """Return a field of this process's status in bytes: `VmRSS` is the resident set, `VmHWM` its peak."""
    match = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None, f"this kernel does not report {field}"
    return int(match[1]) * 1024


def reset_peak() -> None:
    """Reset `VmHWM` to the current resident set."""
    Path("/proc/self/clear_refs").write_text("5")
