"""Figure: a heat map of accuracy by depth and length for each variant, and the losses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from task import NUM_VALUES

_COLOURS = {"full": "#0072b2", "own-chunk": "#6b737c", "cut": "#d98a00"}
_STYLES = {"full": "-", "own-chunk": "-", "cut": "--"}  # two equal curves are both visible
_SMOOTH = 10  # steps averaged in one point of a curve


def draw(results: Mapping[str, Mapping[str, Any]], trained: int, path: Path) -> None:
    """Write the figure.

    Args:
        results: results by variant: `evaluations`, one for each length, and `losses`.
        trained: longest length of training; a line separates longer ones.
        path: the PNG.
    """
    figure = Figure(figsize=(3.1 * len(results) + 4.2, 3.6), layout="constrained")
    axes = figure.subplots(1, len(results) + 1, width_ratios=[1.0] * len(results) + [1.3])
    for axis, (name, result) in zip(axes, results.items(), strict=False):
        image = _heat_map(axis, name, result["evaluations"], trained)
    axes[0].set_ylabel("depth of the pair")
    figure.colorbar(image, ax=list(axes[:-1]), label="right answers", shrink=0.9)
    _losses(axes[-1], results)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=100)


def _heat_map(axis: Any, name: str, evaluations: Sequence[Mapping[str, Any]], trained: int) -> Any:
    rows = list(zip(*(each["by_depth"] for each in evaluations), strict=True))
    image = axis.imshow(rows, vmin=0, vmax=1, cmap="viridis", aspect="auto", interpolation="nearest")
    axis.set_title(name)
    axis.set_xlabel("tokens" if trained == evaluations[-1]["length"] else "tokens (past the line: not trained)")
    axis.set_xticks(range(len(evaluations)), [_short(each["length"]) for each in evaluations])
    last = len(rows) - 1
    axis.set_yticks([0, last / 2, last], ["beginning", "middle", "end"])
    for place, each in enumerate(evaluations):
        if each["length"] > trained:
            axis.axvline(place - 0.5, color="white", linewidth=2)
            break
    return image


def _losses(axis: Any, results: Mapping[str, Mapping[str, Any]]) -> None:
    for name, result in results.items():
        losses = result["losses"]
        parts = [losses[at : at + _SMOOTH] for at in range(0, len(losses), _SMOOTH)]
        steps = [min((at + 1) * _SMOOTH, len(losses)) for at in range(len(parts))]
        means = [sum(part) / len(part) for part in parts]
        axis.plot(steps, means, label=name, color=_COLOURS[name], linestyle=_STYLES[name])
    axis.axhline(math.log(NUM_VALUES), color="black", linestyle=":", linewidth=1, zorder=0, label="guessing")
    lengths = next(iter(results.values()))["lengths"]
    for step in range(1, len(lengths)):
        if lengths[step] != lengths[step - 1]:
            axis.axvline(step, color="#cccccc", linewidth=1, zorder=0)
            axis.text(step, 4.0, f" {_short(lengths[step])}", fontsize=8, rotation=90, va="top", color="#555555")
    axis.set_ylim(0, 4.1)
    axis.set_title("loss of the answers")
    axis.set_xlabel("step")
    axis.legend(loc="lower left", fontsize=8)


def _short(length: int) -> str:
    return f"{length // 1024}K" if length >= 1024 and length % 1024 == 0 else str(length)
