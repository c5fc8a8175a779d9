"""Tests that take too long for every change: `make soak`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from test_budgets import ANYTHING, check_any_budget

pytestmark = pytest.mark.soak
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_memory_does_not_grow_at_fixed_budgets(tmp_path: Path) -> None:
    """16K to 64K tokens, everything beyond its budget on disk: the peak of the resident set, within 5%."""
    size = ["--lengths", "16384", "65536", "--hidden", "64"]
    arguments = [*size, "--offload-dir", tmp_path, "--out", tmp_path / "flat.json"]
    command = [sys.executable, str(BENCHMARKS / "flat_memory.py"), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("strategy", ["auto", "head_groups", "streamed"])  # one each, so that they share the cores
@settings(max_examples=700, deadline=None)
@given(**{name: values for name, values in ANYTHING.items() if name != "attn_strategy"})
def test_many_seeds_of_the_adversary(strategy: str, **choice: Any) -> None:
    check_any_budget(attn_strategy=strategy, **choice)
