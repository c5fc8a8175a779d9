"""Results of `vs_checkpointing.py`: one JSON file of raw samples, and figures computed from them."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from _variants import BASELINE, VARIANTS, Setup

import trunkline

# Student's t, two-sided 95%, for 1, 2, … degrees of freedom. Larger ones use the last value, which is slightly wide.
_T95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Ratio:
    """Ratio of paired samples, with its interval.

    Attributes:
        mean: geometric mean of the ratios of all rounds.
        low: lower end of the 95% interval (t on the logarithms); None with fewer than two rounds.
        high: upper end of the interval.
        of_medians: ratio of the two medians, over the same rounds.
    """

    mean: float
    low: float | None
    high: float | None
    of_medians: float


def paired(samples: Sequence[float], references: Sequence[float]) -> Ratio:
    """Return the ratio of samples to references; both come from the same rounds."""
    logs = [math.log(a / b) for a, b in zip(samples, references, strict=True)]
    center = statistics.fmean(logs)
    of_medians = statistics.median(samples) / statistics.median(references)
    if len(logs) < 2:
        return Ratio(math.exp(center), None, None, of_medians)
    half = _T95[min(len(logs) - 1, len(_T95)) - 1] * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(math.exp(center), math.exp(center - half), math.exp(center + half), of_medians)


@dataclass(frozen=True, slots=True)
class Row:
    """Figures of one variant at one length and dtype; None for a figure that was not measured."""

    length: int
    dtype: str
    variant: str
    runs: int
    seconds: float | None
    time: Ratio | None
    extra_peak: int | None
    memory: float | None
    outside_stores: int | None
    attention_share: float | None
    matmul_share: float | None
    over_bare: Ratio | None
    failed: str | None


class Cell:
    """Samples at one length and dtype.

    Attributes:
        rounds: list of rounds; each has `order`, and `seconds`, `cores` and `loss` by name. The name `bare:<variant>`
            stands for a variant's kernel calls run alone.
        memory: results of `_memory.measure`, by variant.
        parts: one recorded step by variant: its `seconds`, the seconds in `attention` and in `matmul`, and the `counts`
            of calls.
    """

    def __init__(self, length: int, dtype: str, saved: dict[str, Any] | None = None) -> None:
        saved = saved or {}
        self.length, self.dtype = length, dtype
        self.rounds: list[dict[str, Any]] = saved.get("rounds", [])
        self.memory: dict[str, dict[str, Any]] = saved.get("memory", {})
        self.parts: dict[str, dict[str, Any]] = saved.get("parts", {})

    def __str__(self) -> str:
        return f"{self.length:,} tokens, {self.dtype}"

    def rounds_with(self, *names: str) -> list[dict[str, float]]:
        """Return the seconds of each round in which all given names ran."""
        return [r["seconds"] for r in self.rounds if all(name in r["seconds"] for name in names)]

    def row(self, variant: str) -> Row | None:
        """Return the figures of a variant; None if nothing was measured."""
        own = self.rounds_with(variant)
        memory, parts = self.memory.get(variant, {}), self.parts.get(variant, {})
        if not own and not memory and not parts:
            return None
        extra, reference = memory.get("extra_peak"), self.memory.get(BASELINE, {}).get("extra_peak")
        return Row(
            length=self.length,
            dtype=self.dtype,
            variant=variant,
            runs=len(own),
            seconds=statistics.median(r[variant] for r in own) if own else None,
            time=self._ratio(variant, BASELINE),
            extra_peak=extra,
            memory=extra / reference if extra is not None and reference else None,
            outside_stores=memory.get("beyond_stores"),
            attention_share=parts["attention"] / parts["seconds"] if parts else None,
            matmul_share=parts["matmul"] / parts["seconds"] if parts else None,
            over_bare=self._ratio(variant, f"bare:{variant}"),
            failed=memory.get("failed"),
        )

    def rows(self) -> list[Row]:
        """Return the figures of all measured variants."""
        return [row for row in map(self.row, VARIANTS) if row is not None]

    def _ratio(self, name: str, reference: str) -> Ratio | None:
        both = self.rounds_with(name, reference)
        return paired([r[name] for r in both], [r[reference] for r in both]) if both else None


class Results:
    """JSON file of a benchmark, written after every measurement.

    Args:
        path: path of the file.
        setup: setup that all cells share.
        merge: add to an existing file; otherwise replace it.

    Raises:
        ValueError: the file has another setup, other versions or another machine.
    """

    def __init__(self, path: Path, setup: Setup, *, merge: bool) -> None:
        self.path = path
        self.fixed = {"setup": dataclasses.asdict(setup), "versions": _versions(), "machine": _machine()}
        self.cells: dict[str, Cell] = {}
        if not merge or not path.exists():
            return
        saved = json.loads(path.read_text())
        for part, value in self.fixed.items():
            if saved[part] != value:
                raise ValueError(
                    f"--merge: {path} was measured with {part} {saved[part]}, and this run has {value}: give another "
                    "--out, or leave out --merge to measure everything again."
                )
        for cell in saved["cells"].values():
            self.cell(cell["length"], cell["dtype"], cell)

    def cell(self, length: int, dtype: str, saved: dict[str, Any] | None = None) -> Cell:
        """Return the cell of a length and dtype; create it if it is new."""
        return self.cells.setdefault(f"{dtype}/{length}", Cell(length, dtype, saved))

    def rows(self) -> list[Row]:
        """Return all figures, by dtype and length."""
        cells = sorted(self.cells.values(), key=lambda cell: (cell.dtype != "fp32", cell.length))
        return [row for cell in cells for row in cell.rows()]

    def save(self) -> None:
        """Write the file atomically."""
        everything = {
            **self.fixed,
            "cells": {key: vars(cell) for key, cell in self.cells.items()},
            "summary": [dataclasses.asdict(row) for row in self.rows()],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(everything, indent=1))
        partial.replace(self.path)


def _versions() -> dict[str, str]:
    loaded = sorted(m.__file__ for name, m in sys.modules.items() if name.split(".")[0] == "trunkline" and m.__file__)
    source = b"".join(Path(file).read_bytes() for file in loaded)
    return {
        # The hash covers the source of all loaded modules, so that one ratio never mixes samples of two engines.
        "trunkline": f"{trunkline.__version__}+{hashlib.blake2b(source, digest_size=6).hexdigest()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def _machine() -> dict[str, Any]:
    names = [x for x in Path("/proc/cpuinfo").read_text().splitlines() if x.startswith("model name")]
    return {
        "processor": names[0].split(":", 1)[1].strip() if names else platform.processor(),
        "cores": len(names),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "bf16_instructions": bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    }
