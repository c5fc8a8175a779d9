"""Timing of functions in alternation, and the JSON file that every script writes."""

from __future__ import annotations

import json
import platform
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers


def alternate(
    things: Mapping[str, Callable[[], float]], rounds: int, tell: Callable[[str], None]
) -> dict[str, list[float]]:
    """Run every function once per round, and rotate the order from round to round.

    Args:
        things: functions by name; each runs and returns its seconds.
        rounds: number of rounds.
        tell: called with a line of text for each measurement.

    Returns:
        Seconds by name, one sample per round.
    """
    names = list(things)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(rounds):
        shift = number % len(names)
        for name in names[shift:] + names[:shift]:
            seconds[name].append(things[name]())
            tell(f"round {number + 1}: {name} {seconds[name][-1]:.2f} s")
    return seconds


def median(samples: list[float]) -> float:
    """Return the median."""
    return statistics.median(samples)


def machine() -> dict[str, Any]:
    """Describe the machine and the library versions."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = next((line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), "")
    return {
        "processor": model or platform.processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write results, raw samples and the description of the machine as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), **content}, indent=1) + "\n")
