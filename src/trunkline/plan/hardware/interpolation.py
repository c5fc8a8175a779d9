"""Rates of any size, interpolated between measured sizes.

Between samples a rate is interpolated in the logarithms of sizes and rates. Beyond the outermost samples a rate of
`RateSamples` stays the same, so that it is never above the fastest sample or below the slowest. Two cases have formulas
of their own: causal attention over more keys, and other head dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

Floats: TypeAlias = NDArray[np.float64]

_POWER = 4  # of inverse distance weights: above the number of axes (3), so that near samples decide
_HEAD_STEP = 32  # flash kernels on GPUs pad the head dim to a multiple of this


class RateSamples:
    """Rates at points of several sizes: exact at a point, inverse distance weighting in between.

    Args:
        rows: one for each point: its sizes, 1 or more each, then its rate.

    Attributes:
        largest_sizes: largest sample of each size.
        fastest: highest rate of all samples.
        at_largest: rate of the last point in the order of sizes; in a `RateCurve` that of the largest size.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        table = np.array(sorted(map(tuple, rows)), dtype=np.float64)
        self._places, self._rates = np.log2(table[:, :-1]), table[:, -1]
        self.largest_sizes = table[:, :-1].max(axis=0)
        self.fastest, self.at_largest = float(self._rates.max()), float(self._rates[-1])
        self._known: dict[tuple[float, ...], float] = {}  # an estimate asks for few sizes, thousands of times

    def rate(self, *sizes: float) -> float:
        """Return the rate at these sizes; a size beyond the samples counts as the nearest sampled one."""
        if sizes not in self._known:
            place = np.log2(np.maximum(sizes, 1)).clip(self._places.min(axis=0), self._places.max(axis=0))
            squared = ((self._places - place) ** 2).sum(axis=1)
            exact = self._rates[squared.argmin()] if not squared.all() else None
            self._known[sizes] = float(np.exp(self._log_rate(place, squared)).item() if exact is None else exact)
        return self._known[sizes]

    def _log_rate(self, place: Floats, squared: Floats) -> Floats:
        weights = squared ** (-_POWER / 2)
        return np.average(np.log(self._rates), weights=weights, keepdims=True)


class RateCurve(RateSamples):
    """Rates over one size: exact at a sample, straight lines of logarithms in between."""

    @override
    def _log_rate(self, place: Floats, squared: Floats) -> Floats:
        return np.interp(place, self._places[:, 0], np.log(self._rates))


class AttentionSamples:
    """Rates of attention kernels over queries and keys, with and without a causal mask.

    Args:
        rows: one for each sample: queries, keys, 1 if causal or 0, FLOP/s.

    Attributes:
        fastest: highest FLOP/s of all samples.

    Raises:
        ValueError: only causal samples are given, or only others.
    """

    def __init__(self, rows: Sequence[Sequence[float]]) -> None:
        if {bool(row[2]) for row in rows} != {False, True}:
            raise ValueError("give at least one causal and one other point (third column 1 and 0)")
        self._causal, self._full = (RateSamples([(q, k, rate) for q, k, causal, rate in rows if causal == kind])
                                    for kind in (1, 0))  # fmt: skip
        self.fastest = max(self._causal.fastest, self._full.fastest)

    def rate(self, queries: int, keys: int, causal: bool) -> float:
        """Return FLOP/s of one call; with more keys than any causal sample, a causal rate nears that without a mask."""
        full, edge = self._full.rate(queries, keys), self._causal.largest_sizes[1]
        if not causal:
            return full
        rate = self._causal.rate(queries, keys)
        if keys <= edge or full <= rate:
            return rate
        # Beyond the samples: the diagonal's extra time grows with the keys, the time of all pairs with their square.
        return float(1 / (1 / full + (1 / rate - 1 / full) * edge / keys))


def rate_of_head_dim(head_dim: int, rates: Mapping[int, float], *, padded: bool) -> float:
    """Return FLOP/s of a head dim from those of others.

    Between two of them the time of a pair of tokens is linear. Below all of them that time stays, above all of them the
    rate.

    Args:
        head_dim: of queries and keys.
        rates: FLOP/s by head dim, of those that were measured; at least one.
        padded: kernels pad the head dim to a multiple of 32, as they do on GPUs.
    """
    if head_dim in rates:
        return rates[head_dim]
    known = sorted(rates)
    computed = -(-head_dim // _HEAD_STEP) * _HEAD_STEP if padded else head_dim
    if computed > known[-1]:  # nearly all products, hardly any softmax: the rate stays
        return rates[known[-1]] * head_dim / computed
    # Below all of them nearly all is softmax, whose time does not depend on the head dim: np.interp keeps the time.
    return head_dim / float(np.interp(computed, known, [dim / rates[dim] for dim in known]))
