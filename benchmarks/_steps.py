"""Steps of one model with several settings, in alternation: seconds, peaks and moved bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from _alternation import alternate, median
from _variants import Setup, prepare, step, tokens

import trunkline


def smallest_budget(model: Any, length: int, **settings: Any) -> int:
    """Find the smallest device budget with which an estimate of the step fits."""
    low, high = 1, 2**34
    while high - low > 4_096:
        middle = (low + high) // 2
        try:
            trunkline.estimate(model, length, device_budget=middle, disk_budget=2**50, **settings)
        except ValueError:
            low = middle
        else:
            high = middle
    return high


def measure_steps(
    setup: Setup, base: Any, length: int, runs: int, variants: Mapping[str, dict[str, Any]], tell: Callable[[str], None]
) -> dict[str, Any]:
    """Measure seconds, exposed seconds, moved bytes and peaks of steps, for the `stream` settings of each variant."""
    models = {name: prepare(base, "attention", setup, **settings) for name, settings in variants.items()}
    meters: dict[str, list[trunkline.Stats]] = {name: [] for name in models}
    ids_BS = tokens(setup, length)

    def timed(name: str) -> Callable[[], float]:
        def run() -> float:
            trunkline.stats(models[name])
            seconds = step(models[name], ids_BS).seconds
            meters[name].append(trunkline.stats(models[name]))
            return seconds

        return run

    for model in models.values():
        step(model, tokens(setup, 2 * int(setup.chunk_size)))
    seconds = alternate({name: timed(name) for name in models}, runs, tell)
    return {
        "seconds": seconds,
        "exposed": {n: [sum(t.exposed for t in m.lanes.values()) for m in each] for n, each in meters.items()},
        "moved": {n: each[-1].moved for n, each in meters.items()},
        "peaks": {n: each[-1].peaks for n, each in meters.items()},
    }


def exposed_share(found: Mapping[str, Any], name: str) -> float:
    """Return the share of a step in which compute waited for its lanes: the median over all rounds."""
    return median([e / s for e, s in zip(found["exposed"][name], found["seconds"][name], strict=True)])
