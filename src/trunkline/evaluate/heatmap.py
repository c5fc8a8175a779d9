"""Pictures: scores over length and depth, perplexity over positions. Matplotlib is imported here alone."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.evaluate.results import Evaluation
from trunkline.evaluate.scoring import Way
from trunkline.evaluate.table import WAY_TITLES, length_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_AN_INCH = 150
# Inches of a cell and of a panel. A number of three digits needs 0.3 by 0.16 at the size of font below.
_CELL_WIDTH, _CELL_HEIGHT = 0.5, 0.24
_MOST_WIDTH, _MOST_HEIGHT = 6.0, 4.0
_LEAST_FOR_NUMBERS = (0.3, 0.16)
_COLUMNS = 3


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_heatmap(evaluation: Evaluation, way: Way, path: Path) -> None:
    """Draw the share of answers retrieved: a panel a task, lengths across, depths downwards.

    Args:
        evaluation: what was found; it has outcomes of that way.
        way: `forced` or `generated`.
        path: of the PNG.
    """
    tasks = list(evaluation.task_scores(way))
    lengths = sorted(evaluation.length_scores(way))
    scores = {(c.task, c.length, c.depth): c.score for c in evaluation.cells() if c.way == way}
    depths = {task: _depths_of(scores, task) for task in tasks}
    width = min(_MOST_WIDTH, max(1.8, _CELL_WIDTH * len(lengths)))
    rows = [tasks[first : first + _COLUMNS] for first in range(0, len(tasks), _COLUMNS)]
    heights = [min(_MOST_HEIGHT, max(0.3, _CELL_HEIGHT * max(len(depths[task]) for task in row))) for row in rows]
    num_columns = min(_COLUMNS, len(tasks))
    figure = _figure((width + 1.0) * num_columns + 0.9, max(2.4, sum(heights) + 0.95 * len(rows) + 0.3))
    grid = figure.subplots(len(rows), num_columns, squeeze=False, height_ratios=heights)
    for axes_row, row, height in zip(grid, rows, heights, strict=True):
        for axes in axes_row[len(row) :]:
            axes.set_axis_off()
        for axes, task in zip(axes_row, row, strict=False):
            values = [[scores.get((task, length, d), math.nan) for length in lengths] for d in depths[task]]
            image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
            _label(axes, task, lengths, depths[task])
            own = height * len(depths[task]) / max(len(depths[name]) for name in row)
            axes.set_box_aspect(own / width)
            axes.set_anchor("N")
            cell = (width / len(lengths), height / max(len(depths[name]) for name in row))
            if cell[0] >= _LEAST_FOR_NUMBERS[0] and cell[1] >= _LEAST_FOR_NUMBERS[1]:
                _write_numbers(axes, values)
    bar = figure.colorbar(image, ax=grid, shrink=0.9, aspect=30, pad=0.02)
    bar.set_label(f"answers retrieved (%)\n{WAY_TITLES[way]}", fontsize=8)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"], fontsize=8)
    threshold = evaluation.settings.threshold
    bar.ax.axhline(threshold, color="white", linewidth=1.5)
    _save(figure, path)


def write_perplexity(evaluation: Evaluation, path: Path) -> None:
    """Draw perplexity over positions.

    Args:
        evaluation: what was found; it has perplexity by position.
        path: of the PNG.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(6.5, 3.6)
    axes = figure.subplots()
    doubling = evaluation.settings.bin_width is None
    bins = evaluation.by_position
    # A bin lies where most would look for it: in the middle of what the axis shows of it.
    middles = [math.sqrt(b.first * b.last) if doubling else (b.first + b.last) / 2 for b in bins]
    axes.plot(middles, [b.perplexity for b in bins], color="#0072b2", marker="o", markersize=3.5)
    axes.set_yscale("log")
    # Between powers of ten a logarithmic axis would have no number at all on most curves.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    if doubling:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: length_text(round(value)))
    else:
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.set_xlabel("position: tokens of the document before this one", fontsize=9)
    axes.set_ylabel("perplexity", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dfe2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    _save(figure, path)


def _depths_of(scores: dict[tuple[str, int, float | None], float], task: str) -> list[float | None]:
    found = {depth for name, _, depth in scores if name == task}
    return sorted(found, key=lambda depth: -1.0 if depth is None else depth)


def _label(axes: Axes, task: str, lengths: list[int], depths: list[float | None]) -> None:
    axes.set_title(task, fontsize=9)
    every = max(1, -(-len(lengths) // 12))
    axes.set_xticks(
        range(0, len(lengths), every),
        [length_text(length) for length in lengths[::every]],
        fontsize=7,
        rotation=45 if any(len(length_text(length)) > 4 for length in lengths) else 0,
    )
    every = max(1, -(-len(depths) // 16))
    digits = ".3g" if every == 1 else ".0f"
    shown = ["all" if depth is None else f"{100 * depth:{digits}}%" for depth in depths[::every]]
    axes.set_yticks(range(0, len(depths), every), shown, fontsize=7)
    axes.set_xlabel("length in tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    axes.tick_params(length=2)
    for edge in range(1, len(lengths)):
        axes.axvline(edge - 0.5, color="white", linewidth=0.4)
    for edge in range(1, len(depths)):
        axes.axhline(edge - 0.5, color="white", linewidth=0.4)


def _write_numbers(axes: Axes, values: list[list[float]]) -> None:
    for row, line in enumerate(values):
        for column, value in enumerate(line):
            if not math.isnan(value):
                # Viridis is dark up to two thirds of its way, and white is read on it.
                colour = "white" if value < 0.65 else "black"
                axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=colour)


def _figure(width: float, height: float) -> Figure:
    # Without pyplot there is no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_AN_INCH, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    # The program's version would make files differ that show the same.
    figure.savefig(path, metadata={"Software": None})
