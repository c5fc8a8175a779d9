"""Plots of an evaluation: scores over length and depth, perplexity over positions."""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from trunkline.evaluate.evaluation import Evaluation
from trunkline.evaluate.evaluation_settings import length_text
from trunkline.evaluate.outcomes import Way
from trunkline.evaluate.score_tables import WAY_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DOTS_AN_INCH = 150
_COLUMNS = 3
# Inches of a cell and of a panel. A number of three digits needs 0.3 by 0.16.
_CELL_WIDTH, _CELL_HEIGHT = 0.5, 0.24
_MOST_WIDTH, _MOST_HEIGHT = 6.0, 4.0


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_heatmap(evaluation: Evaluation, way: Way, path: Path) -> None:
    """Write the heat map of the share of answers retrieved: a panel a task, lengths across, depths downwards.

    Args:
        evaluation: an evaluation with outcomes of that way.
        way: `forced` or `generated`.
        path: the PNG.
    """
    cells = {(c.task, c.length, c.depth): c.score for c in evaluation.cells() if c.way == way}
    tasks = list(evaluation.task_scores(way))
    lengths = sorted({length for _, length, _ in cells})
    depths = sorted({depth for *_, depth in cells})
    width = min(_MOST_WIDTH, max(1.8, _CELL_WIDTH * len(lengths)))
    height = min(_MOST_HEIGHT, max(0.3, _CELL_HEIGHT * len(depths)))
    with_numbers = width / len(lengths) >= 0.3 and height / len(depths) >= 0.16
    columns, rows = min(_COLUMNS, len(tasks)), -(-len(tasks) // _COLUMNS)
    figure = _figure((width + 1.0) * columns + 0.9, max(2.4, (height + 0.95) * rows + 0.3))
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat[len(tasks) :]:
        axes.set_axis_off()
    for task, axes in zip(tasks, grid.flat, strict=False):
        values = [[cells.get((task, length, depth), math.nan) for length in lengths] for depth in depths]
        image = axes.imshow(values, cmap="viridis", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set_title(task, fontsize=9)
        axes.set_box_aspect(height / width)
        axes.set_anchor("N")
        _label(axes, lengths, depths)
        for row, line in enumerate(values if with_numbers else []):
            for column, value in enumerate(line):
                if not math.isnan(value):  # viridis is dark up to two thirds of its range
                    colour = "white" if value < 0.65 else "black"
                    axes.text(column, row, f"{100 * value:.0f}", ha="center", va="center", fontsize=7, color=colour)
    bar = figure.colorbar(image, ax=grid, shrink=0.9, aspect=30, pad=0.02)
    bar.set_label(f"answers retrieved (%)\n{WAY_TITLES[way]}", fontsize=8)
    bar.set_ticks([0, 0.25, 0.5, 0.75, 1], labels=["0", "25", "50", "75", "100"], fontsize=8)
    bar.ax.axhline(evaluation.settings.threshold, color="white", linewidth=1.5)
    _save(figure, path)


def _label(axes: Axes, lengths: list[int], depths: list[float]) -> None:
    every = max(1, -(-len(lengths) // 12))
    texts = [length_text(length) for length in lengths[::every]]
    axes.set_xticks(range(0, len(lengths), every), texts, fontsize=7, rotation=45 if max(map(len, texts)) > 4 else 0)
    every = max(1, -(-len(depths) // 16))
    digits = ".3g" if every == 1 else ".0f"
    axes.set_yticks(range(0, len(depths), every), [f"{100 * d:{digits}}%" for d in depths[::every]], fontsize=7)
    axes.set_xlabel("length in tokens", fontsize=8)
    axes.set_ylabel("depth", fontsize=8)
    axes.set_xticks([edge - 0.5 for edge in range(1, len(lengths))], minor=True)
    axes.set_yticks([edge - 0.5 for edge in range(1, len(depths))], minor=True)
    axes.grid(which="minor", color="white", linewidth=0.4)
    axes.tick_params(length=2)
    axes.tick_params(which="minor", length=0)


def write_perplexity(evaluation: Evaluation, path: Path) -> None:
    """Write the plot of perplexity over positions.

    Args:
        evaluation: an evaluation with perplexity by position.
        path: the PNG.
    """
    from matplotlib.ticker import LogLocator

    figure = _figure(6.5, 3.6)
    axes = figure.subplots()
    doubling = evaluation.settings.bin_width is None
    bins = evaluation.by_position
    # Mark a bin in the middle of its range as the axis shows it.
    middles = [math.sqrt(b.first * b.last) if doubling else (b.first + b.last) / 2 for b in bins]
    axes.plot(middles, [b.perplexity for b in bins], color="#0072b2", marker="o", markersize=3.5)
    axes.set_yscale("log")
    # With powers of ten alone, most curves would have no labelled tick.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.4g}")
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    if doubling:
        axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: length_text(round(value)) if doubling else f"{value:,.0f}")
    axes.set_xlabel("position: tokens of the document before this one", fontsize=9)
    axes.set_ylabel("perplexity", fontsize=9)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(color="#dfe2e6", linewidth=0.8)
    axes.set_axisbelow(True)
    _save(figure, path)


def _figure(width: float, height: float) -> Figure:
    # Without pyplot there is no global state and no window system.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_AN_INCH, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    # Leave out matplotlib's version, so that equal plots are equal files.
    figure.savefig(path, metadata={"Software": None})
