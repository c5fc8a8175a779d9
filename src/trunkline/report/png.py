"""The charts as PNG files, for slides and papers. Matplotlib is imported here alone, and only when they are drawn."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trunkline.report.folder import Run
from trunkline.report.lanes import drawn_lanes
from trunkline.report.memory import highest, shares_of
from trunkline.report.scale import byte_unit
from trunkline.report.thin import busy_shares, columns
from trunkline.report.timeline import Timeline
from trunkline.report.words import bytes_text
from trunkline.units import TIERS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

STEPS, MEMORY, HOLDERS, LANES = "steps.png", "memory.png", "holders.png", "lanes.png"
NAMES = (STEPS, MEMORY, HOLDERS, LANES)

_COLOURS = ("#0072b2", "#e69f00", "#00795a", "#cc79a7", "#7cc7f2", "#c64f00", "#f0e442", "#6b737c")
_LANE_COLOURS = {"compute": "#0072b2", "fetch": "#d98a00", "stash": "#00855f", "comm": "#b0568c"}
_PHASE_COLOURS = {"forward": "#56b4e9", "head": "#b0568c", "backward": "#d98a00", "optimizer": "#1b1f24"}
_DOTS_AN_INCH = 150
_COLUMNS = 1600
_ACROSS = 3  # charts over the steps side by side


def can_draw() -> bool:
    """Return whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def write_pngs(run: Run, folder: Path) -> None:
    """Write the charts that the run has data for.

    Args:
        run: what its folder holds.
        folder: it exists; files of the names in `NAMES` are written there.
    """
    steps = [step for step in (run.before, run.timeline) if step is not None]
    _write_curves(run, folder / STEPS)
    if any(step.peak(tier) for step in steps for tier in TIERS):
        _write_memory(steps, run.before is not None, folder / MEMORY)
    if run.timeline is not None:
        if any(shares_of(run.timeline, tier) for tier in TIERS):
            _write_holders(run.timeline, folder / HOLDERS)
        if drawn_lanes(run.timeline):
            _write_lanes(run.timeline, folder / LANES)


def _figure(width: float, height: float) -> Figure:
    # Without pyplot there is no global state, and no window system is looked for.
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), dpi=_DOTS_AN_INCH, layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    # The program's version would make files differ that show the same.
    figure.savefig(path, metadata={"Software": None})


def _plain(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#dfe2e6", linewidth=0.8)
    axes.set_axisbelow(True)


def _write_curves(run: Run, path: Path) -> None:
    curves = run.curves
    if not curves:
        return
    across = min(len(curves), _ACROSS)
    down = -(-len(curves) // across)
    figure = _figure(4.6 * across, 3.2 * down)
    places = figure.subplots(down, across, squeeze=False).flatten()
    for axes in places[len(curves) :]:
        axes.remove()
    for axes, curve in zip(places, curves, strict=False):
        axes.plot(
            curve.steps, curve.values, color=_COLOURS[0], marker="o" if len(curve.steps) <= 40 else "", markersize=3
        )
        axes.set_title(curve.title, fontsize=10)
        axes.set_xlabel("step")
        axes.xaxis.get_major_locator().set_params(integer=True)
        if curve.from_zero:
            axes.set_ylim(0, max(axes.get_ylim()[1], curve.up_to or 0))
        _plain(axes)
    _save(figure, path)


def _write_memory(steps: Sequence[Timeline], with_before: bool, path: Path) -> None:
    tiers = [tier for tier in TIERS if any(step.peak(tier) for step in steps)]
    figure = _figure(6.5 * len(steps) + 1.5, 3.0 * len(tiers))
    grid = figure.subplots(len(tiers), len(steps), squeeze=False, sharex=True, sharey="row")
    longest = max(step.seconds for step in steps)
    for row, tier in zip(grid, tiers, strict=True):
        unit, name = byte_unit(highest(steps, tier))
        for axes, step in zip(row, steps, strict=True):
            if not step.peak(tier):
                axes.set_axis_off()
                continue
            _draw_tier(axes, step, tier, unit)
            which = ("before, unchunked: " if step is steps[0] else "after, in chunks: ") if with_before else ""
            axes.set_title(f"{which}{tier}, peak {bytes_text(step.peak(tier) or 0)}", fontsize=10, pad=18)
            axes.set_ylabel(name)
            axes.set_xlabel("seconds")
            axes.tick_params(labelbottom=True, labelleft=True)
            axes.set_xlim(0, longest)
            _plain(axes)
        row[0].set_ylim(0, highest(steps, tier) / unit * 1.08)
    _save(figure, path)


def _draw_tier(axes: Axes, step: Timeline, tier: str, unit: float) -> None:
    _draw_phases(axes, step)
    low, high = columns(step.memory.get(tier, []), step.seconds, _COLUMNS)
    edges = [step.seconds * i / _COLUMNS for i in range(_COLUMNS + 1)]
    for values, opacity in ((high, 0.32), (low, 0.45)):
        axes.stairs([value / unit for value in values], edges, fill=True, color=_COLOURS[0], alpha=opacity, linewidth=0)
    axes.stairs([value / unit for value in high], edges, color=_COLOURS[0], linewidth=0.8)
    capacity = step.capacity.get(tier)
    if capacity is not None and capacity <= highest([step], tier):
        axes.axhline(capacity / unit, color=_COLOURS[5], linestyle="--", linewidth=1.2)
        axes.annotate(
            f"capacity {bytes_text(capacity)}",
            (1, capacity / unit),
            xycoords=("axes fraction", "data"),
            xytext=(-4, -3),
            textcoords="offset points",
            ha="right",
            va="top",
            fontsize=8,
            color=_COLOURS[5],
            bbox={"facecolor": "white", "alpha": 0.8, "linewidth": 0, "pad": 1},
        )


def _draw_phases(axes: Axes, step: Timeline) -> None:
    named: set[str] = set()
    for phase in step.phases:
        colour = _PHASE_COLOURS.get(phase.name, "#8a929b")
        axes.axvspan(phase.begin, phase.end, color=colour, alpha=0.1, linewidth=0)
        if phase.end - phase.begin > 0.1 * step.seconds and phase.name not in named:
            named.add(phase.name)
            place: Any = ("data", "axes fraction")
            middle = (phase.begin + phase.end) / 2
            axes.annotate(phase.name, (middle, 1.01), xycoords=place, ha="center", va="bottom", fontsize=8)


def _write_holders(timeline: Timeline, path: Path) -> None:
    tiers = [tier for tier in TIERS if shares_of(timeline, tier)]
    figure = _figure(10, 1.9 * len(tiers))
    for axes, tier in zip(figure.subplots(len(tiers), 1, squeeze=False)[:, 0], tiers, strict=True):
        shares = shares_of(timeline, tier)
        unit, name = byte_unit(sum(share.nbytes for share in shares))
        begin = 0.0
        for share in shares:
            size = share.nbytes / unit
            style: dict[str, Any] = {"color": "none", "hatch": "///", "edgecolor": "#b5bac0"}
            if share.colour is not None:
                style = {"color": _COLOURS[share.colour], "edgecolor": "white"}
            axes.barh(0, size, left=begin, label=f"{share.name}, {bytes_text(share.nbytes)}", **style)
            begin += size
        axes.set_yticks([0], [tier])
        axes.set_xlim(0, begin)
        axes.set_xlabel(name)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.legend(ncols=3, fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), frameon=False)
    _save(figure, path)


def _write_lanes(timeline: Timeline, path: Path) -> None:
    names = drawn_lanes(timeline)
    figure = _figure(12, 1.2 + 0.55 * len(names))
    axes = figure.subplots()
    _draw_phases(axes, timeline)
    edges = [timeline.seconds * i / _COLUMNS for i in range(_COLUMNS + 1)]
    for row, name in enumerate(reversed(names)):
        shares = busy_shares(timeline.lanes[name], timeline.seconds, _COLUMNS)
        axes.stairs([row + 0.8 * share for share in shares], edges, baseline=row, fill=True, color=_LANE_COLOURS[name])
    axes.set_yticks([row + 0.4 for row in range(len(names))], list(reversed(names)))
    axes.set_xlim(0, timeline.seconds)
    axes.set_ylim(-0.3, len(names))
    axes.set_xlabel("seconds; a lane's height is how busy it is")
    axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)
