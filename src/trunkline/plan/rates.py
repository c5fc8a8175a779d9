"""How fast a device computes: speeds of any size from the samples of a profile.

Between samples a rate is interpolated in the logarithms of sizes and rates, and beyond them it stays what it is at the
edge: no speed is ever above the fastest sample or below the slowest. Causal attention of more keys than any sample has
comes nearer to attention of all pairs, since only its diagonal differs.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from trunkline.plan.figures import NoFigures

Direction = Literal["forward", "backward"]
MemoryKind = Literal["copy", "pointwise", "transcendental", "reduction"]

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
_NEARNESS = 4  # power of the distance by which samples lose weight: well above the three axes, so that near ones decide
_HEAD_STEP = 32  # flash kernels on GPUs pad the head dim to a multiple of this


class Samples:
    """Rates at some sizes of several axes: exact there, weighted by nearness in between, constant beyond."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        """Take samples.

        Args:
            rows: the sizes, of as many axes as there are, then the rate.
        """
        self._at = [tuple(math.log2(size) for size in row[:-1]) for row in rows]
        self._rates = [float(row[-1]) for row in rows]
        self._logs = [math.log(rate) for rate in self._rates]
        self._low = [min(axis) for axis in zip(*self._at, strict=True)]
        self._high = [max(axis) for axis in zip(*self._at, strict=True)]
        self.largest = [max(axis) for axis in zip(*(row[:-1] for row in rows), strict=True)]  # of each axis

    def __call__(self, *sizes: float) -> float:
        """The rate at these sizes; a size below 1 counts as 1."""
        place = [
            min(max(math.log2(max(size, 1)), low), high)
            for size, low, high in zip(sizes, self._low, self._high, strict=True)
        ]
        total = weights = 0.0
        for at, rate, log_rate in zip(self._at, self._rates, self._logs, strict=True):
            squared = sum((x - y) ** 2 for x, y in zip(place, at, strict=True))
            if not squared:
                return rate
            weight = squared ** (-_NEARNESS / 2)
            total += weight * log_rate
            weights += weight
        return math.exp(total / weights)


class Curve:
    """Rates at some sizes of one axis: exact there, straight lines between the logarithms, constant beyond."""

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        """Take samples: each a size and a rate."""
        ordered = sorted((float(size), float(rate)) for size, rate in rows)
        self._sizes = [size for size, _ in ordered]
        self._rates = [rate for _, rate in ordered]

    def __call__(self, size: float) -> float:
        """The rate at this size."""
        right = bisect.bisect_left(self._sizes, size)
        if right == len(self._sizes):
            return self._rates[-1]
        if right == 0 or self._sizes[right] == size:
            return self._rates[right]
        low, high = self._sizes[right - 1 : right + 1]
        share = math.log(size / low) / math.log(high / low)
        return math.exp((1 - share) * math.log(self._rates[right - 1]) + share * math.log(self._rates[right]))


class Rates:
    """The speeds of one profile. Every answer is kept, since a rehearsal asks for few sizes very often."""

    def __init__(self, name: str, figures: Mapping[str, Any], kernel: str) -> None:
        """Read the samples.

        Args:
            name: of the profile, for messages.
            figures: the profile, checked.
            kernel: whose attention figures count.
        """
        self._name = name
        self._on_gpu = figures["device_type"] == "cuda"
        self._peak = {dtype: float(entry["value"]) for dtype, entry in figures["peak"].items()}
        self._matmul = {dtype: Samples(entry["points"]) for dtype, entry in figures["matmul"].items()}
        self._memory = {kind: Curve(entry["points"]) for kind, entry in figures["memory"].items()}
        self._attention = {
            direction: {dtype: _by_head_dim(table) for dtype, table in tables.items()}
            for direction, tables in figures["attention"][kernel].items()
        }
        self._matmul_seen: dict[tuple[torch.dtype, int, int, int], float] = {}
        self._attention_seen: dict[tuple[str, torch.dtype, int, int, int, bool], float] = {}
        self._memory_seen: dict[tuple[str, int], float] = {}

    def peak(self, dtype: torch.dtype) -> float:
        """See `Hardware.peak`."""
        name = _NAMES.get(dtype)
        for candidate in (name, "bf16" if name == "fp16" else None):
            if candidate in self._peak:
                return self._peak[candidate]
        raise self._unknown(dtype, "peak", self._peak)

    def matmul(self, dtype: torch.dtype, m: int, n: int, k: int) -> float:
        """See `Hardware.matmul_rate`."""
        key = (dtype, m, n, k)
        if key not in self._matmul_seen:
            name, factor = self._stand_in(dtype, "matmul", self._matmul)
            self._matmul_seen[key] = factor * self._matmul[name](m, n, k)
        return self._matmul_seen[key]

    def attention(
        self, direction: Direction, dtype: torch.dtype, head_dim: int, queries: int, keys: int, causal: bool
    ) -> float:
        """See `Hardware.attention_rate`."""
        key = (direction, dtype, head_dim, queries, keys, causal)
        if key not in self._attention_seen:
            tables = self._attention[direction]
            name, factor = self._stand_in(dtype, f"attention.{direction}", tables)
            rates = {dim: _attention_rate(kinds, queries, keys, causal) for dim, kinds in tables[name].items()}
            self._attention_seen[key] = factor * self._of_head_dim(head_dim, rates)
        return self._attention_seen[key]

    def has_attention(self, dtype: torch.dtype) -> bool:
        """See `Hardware.has_attention`."""
        try:
            for tables in self._attention.values():
                self._stand_in(dtype, "attention", tables)
        except ValueError:
            return False
        return True

    def memory(self, kind: MemoryKind, nbytes: int) -> float:
        """See `Hardware.memory_rate`."""
        key = (kind, nbytes)
        if key not in self._memory_seen:
            self._memory_seen[key] = self._memory[kind](nbytes)
        return self._memory_seen[key]

    def _stand_in(self, dtype: torch.dtype, table: str, tables: Mapping[str, Any]) -> tuple[str, float]:
        """Whose samples count for a dtype, and the factor they take."""
        name = _NAMES.get(dtype)
        if name is not None and name in tables:
            return name, 1.0
        if name == "fp16" and "bf16" in tables:
            return "bf16", 1.0
        if name == "fp32" and self._on_gpu and "bf16" in tables:
            return "bf16", self.peak(dtype) / self.peak(torch.bfloat16)
        raise self._unknown(dtype, table, tables)

    def _of_head_dim(self, head_dim: int, rates: Mapping[int, float]) -> float:
        """A rate for any head dim: the time that a pair of tokens takes is linear between those that are known."""
        if head_dim in rates:
            return rates[head_dim]
        known = sorted(rates)
        computed = -(-head_dim // _HEAD_STEP) * _HEAD_STEP if self._on_gpu else head_dim
        seconds = [dim / rates[dim] for dim in known]
        right = bisect.bisect_left(known, computed)
        if right == len(known):  # all products, hardly any softmax: the rate stays
            return rates[known[-1]] * head_dim / computed
        if right == 0:  # all softmax, whose time does not depend on the head dim: the time stays
            return head_dim / seconds[0]
        low, high = known[right - 1 : right + 1]
        share = (computed - low) / (high - low)
        return head_dim / ((1 - share) * seconds[right - 1] + share * seconds[right])

    def _unknown(self, dtype: torch.dtype, table: str, tables: Mapping[str, Any]) -> NoFigures:
        return NoFigures(
            f"hardware profile {self._name!r} has no figures of {table} for {dtype}, only for {', '.join(tables)}: "
            "choose such a dtype, or a profile that has them."
        )


def _attention_rate(kinds: Mapping[bool, Samples], queries: int, keys: int, causal: bool) -> float:
    rate = kinds[causal](queries, keys)
    edge = kinds[True].largest[1]
    if not causal or keys <= edge:
        return rate
    # What the diagonal costs beside its pairs grows with the keys, and pairs with their square.
    all_pairs = kinds[False](queries, keys)
    return 1 / (1 / all_pairs + (1 / rate - 1 / all_pairs) * edge / keys) if all_pairs > rate else rate


def _by_head_dim(table: Mapping[str, Any]) -> dict[int, dict[bool, Samples]]:
    return {
        int(head_dim): {
            causal: Samples([(q, k, rate) for q, k, flag, rate in entry["points"] if bool(flag) is causal])
            for causal in (False, True)
        }
        for head_dim, entry in table.items()
    }
