"""Choice of test cases: those of every run, and those of `make soak`."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest


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


def others_in_soak(cases: Iterable[Any], every_run: Collection[Any]) -> list[Any]:
    """Mark cases for `make soak`, except a few that represent them in every run.

    Args:
        cases: arguments of a test, or tuples of them.
        every_run: the few.
    """
    cases = list(cases)
    assert all(case in cases for case in every_run)
    return [
        case
        if case in every_run
        else pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.soak)
        for case in cases
    ]
