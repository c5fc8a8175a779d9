"""Test cases that cover every pair of values, in place of every combination, where dimensions act independently."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any


def all_pairs(*dimensions: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Choose combinations such that any two values of different dimensions meet in one of them.

    Args:
        dimensions: the values of each dimension.

    Returns:
        Combinations, chosen greedily and in the same order every time.
    """
    combinations = list(itertools.product(*(range(len(values)) for values in dimensions)))

    def pairs(combination: Iterable[int]) -> set[Any]:
        return set(itertools.combinations(enumerate(combination), 2))

    missing = set().union(*map(pairs, combinations))
    chosen = []
    while missing:
        best = max(combinations, key=lambda combination: len(pairs(combination) & missing))
        chosen.append(best)
        missing -= pairs(best)
    return [tuple(values[i] for values, i in zip(dimensions, each, strict=True)) for each in chosen]
