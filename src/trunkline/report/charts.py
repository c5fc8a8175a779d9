"""Charts of a run, drawn with matplotlib and saved as SVG for the page and as PNG for slides and papers.

A chart has a figure in each of two widths, so that its text keeps its size on a telephone. Sizes are in pixels of the
page. Colours are those of Okabe and Ito, which colour-blind people can tell apart. In the SVG they are CSS variables,
so that one drawing serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import MaxNLocator

from trunkline.report.columns import busy_shares, memory_columns
from trunkline.report.curves import StepCurve, step_curves
from trunkline.report.number_format import seconds_text, short_number
from trunkline.report.run_folder import ReportedRun
from trunkline.report.timeline import LANE_NAMES, PHASES, Phase, Timeline
from trunkline.units import TIERS, format_bytes

# Name: on light paper, on dark paper. The page's style sheet takes its variables from here.
PALETTE = {
    "paper": ("#ffffff", "#14171a"), "card": ("#f5f6f8", "#1d2125"), "ink": ("#1b1f24", "#e8eaed"),
    "soft": ("#59616b", "#a4acb5"), "rule": ("#dfe2e6", "#353b42"), "blue": ("#0072b2", "#4aa8e0"),
    "orange": ("#d98a00", "#f0b13c"), "green": ("#00855f", "#2fbf97"), "red": ("#c64f00", "#f0803c"),
    "pink": ("#b0568c", "#dc93bf"), "sky": ("#56b4e9", "#8fd0f7"), "grey": ("#8a929b", "#7b848d"),
}  # fmt: skip
_COLOUR = {name: light for name, (light, _) in PALETTE.items()}
_LANE_COLOURS = dict(zip(LANE_NAMES, ("blue", "orange", "green", "pink"), strict=True))
_PHASE_COLOURS = dict(zip(PHASES, ("grey", "sky", "pink", "orange", "ink"), strict=True))
_STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.size": 12, "axes.titlesize": 13,
    "axes.titlelocation": "left", "axes.titlepad": 10, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.edgecolor": _COLOUR["soft"], "axes.labelcolor": _COLOUR["soft"],
    "axes.facecolor": "none", "axes.grid": True, "axes.grid.axis": "y", "axes.axisbelow": True,
    "grid.color": _COLOUR["rule"], "grid.linewidth": 1, "text.color": _COLOUR["ink"], "xtick.color": _COLOUR["soft"],
    "ytick.color": _COLOUR["soft"], "ytick.major.size": 0, "legend.frameon": False, "lines.linewidth": 1.8,
}  # fmt: skip
_WIDE, _NARROW = 1008, 380
_FAR = 4  # a capacity of more than so many peaks would make everything else too small to see
MOST_HOLDERS = 8


@dataclass(frozen=True)
class ReportChart:
    """A chart in both widths.

    Attributes:
        name: Name of the PNG file without `.png`.
        alt: Description for people who do not see it.
        wide: Figure for desktops, and for the PNG.
        narrow: Figure for telephones.
    """

    name: str
    alt: str
    wide: Figure
    narrow: Figure

    def svg(self) -> tuple[str, str]:
        """Return the wide and the narrow figure as SVG elements."""
        return _svg(self.wide, self.alt, f"{self.name}-wide"), _svg(self.narrow, self.alt, f"{self.name}-narrow")

    def save_png(self, folder: Path) -> None:
        """Write the wide figure to a folder as `<name>.png`, at twice its size on the page."""
        with _style():
            # The version of matplotlib would make files differ that show the same.
            self.wide.savefig(folder / f"{self.name}.png", dpi=144, facecolor="white", metadata={"Software": None})


def charts_of(run: ReportedRun) -> dict[str, ReportChart]:
    """Draw the charts that a run has data for, by name: steps, memory, memory-own-scale, holders, lanes."""
    charts: dict[str, ReportChart] = {}

    def add(name: str, alt: str, draw: Callable[[int], Figure]) -> None:
        with _style():
            figures = draw(_WIDE), draw(_NARROW)
            for figure in figures:  # lay out once, not with each file
                figure.draw_without_rendering()
                figure.set_layout_engine("none")
        charts[name] = ReportChart(name, alt, *figures)

    if curves := step_curves(run):
        ends = [f"{c.title}: {short_number(c.values[0])} to {short_number(c.values[-1])}" for c in curves]
        add("steps", f"Charts over the steps. {'. '.join(ends)}.", lambda width: _draw_steps(curves, width))
    timelines = {"before: unchunked, gradient checkpointing": run.before, "after: in chunks": run.timeline}
    steps = {name: step for name, step in timelines.items() if step and any(map(step.peak, TIERS))}
    if steps:
        peaks = [
            f"{tier}, {name}, peak {format_bytes(step.peak(tier) or 0)}"
            for tier in TIERS for name, step in steps.items() if step.peak(tier)
        ]  # fmt: skip
        alt = f"Memory through one step. {'. '.join(peaks)}."
        add("memory", alt, lambda width: _draw_memory(steps, width, one_scale=True))
        if len(steps) == 2:
            add("memory-own-scale", f"{alt} Each on its own scale.", lambda width: _draw_memory(steps, width))
    step = run.timeline
    if step:
        held: dict[str, dict[str, int]] = {tier: shares for tier in TIERS if (shares := peak_holders(step, tier))}
        if held:
            parts = [f"{tier}: {', '.join(f'{k} {format_bytes(n)}' for k, n in s.items())}" for tier, s in held.items()]
            add("holders", f"Data at the peak. {'. '.join(parts)}.", lambda width: _draw_holders(step, held, width))
        if any(step.lanes.values()):
            busy = [f"{lane} busy {seconds_text(step.busy(lane))}" for lane in LANE_NAMES if step.lanes.get(lane)]
            alt = f"Work of each lane over {seconds_text(step.seconds)}. {', '.join(busy)}."
            add("lanes", alt, lambda width: _draw_lanes(step, width))
    return charts


def peak_holders(timeline: Timeline, tier: str) -> dict[str, int]:
    """Return the bytes of each kind of data at a tier's peak, the largest first; empty if no kind is known.

    All but the seven largest kinds, and bytes of no known kind, are "other". "free" follows if the capacity is above
    the peak, and at most four times the peak.
    """
    named = sorted(timeline.holders.get(tier, {}).items(), key=lambda item: (-item[1], item[0]))
    shares = {name: n for name, n in named[: MOST_HOLDERS - 1] if n}
    peak = max(timeline.peak(tier) or 0, sum(n for _, n in named))
    if not shares:
        return {}
    if other := peak - sum(shares.values()):
        shares["other"] = shares.get("other", 0) + other
    capacity = timeline.capacity.get(tier)
    if capacity is not None and peak < capacity <= _FAR * peak:
        shares["free"] = capacity - peak
    return shares


@contextmanager
def _style() -> Iterator[None]:
    # The reader's own matplotlibrc does not count.
    with matplotlib.style.context(["default", _STYLE]):
        yield


def _figure(width: int, height: float) -> Figure:
    # 72 units of an SVG are an inch. Without pyplot there is no global state, and no window system is looked for.
    return Figure(figsize=(width / 72, height / 72), dpi=72, layout="constrained")


def _svg(figure: Figure, alt: str, salt: str) -> str:
    text = io.StringIO()
    with _style(), matplotlib.rc_context({"svg.hashsalt": salt}):  # ids are the same each time, and unique in the page
        figure.savefig(text, format="svg", facecolor="none", metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    body = svg[svg.index(">", svg.index("<svg")) + 1 :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    # Only ids of clip paths and markers are referred to; others would be there twice.
    body = re.sub(r' id="(?![pm][0-9a-f]{10}")[^"]*"', "", body)
    body = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d)\d+", r"\1", path[0]), body)
    for name, light in _COLOUR.items():
        body = body.replace(f": {light}", f": var(--{name})")
    width, height = (72 * inches for inches in figure.get_size_inches())
    return f'<svg class="chart" role="img" aria-label="{escape(alt)}" viewBox="0 0 {width:g} {height:g}">{body}'


def _draw_steps(curves: Sequence[StepCurve], width: int) -> Figure:
    across = 1 if width == _NARROW else min(3, len(curves))
    down = -(-len(curves) // across)
    figure = _figure(width, 215 * down)
    places = figure.subplots(down, across, squeeze=False).flatten()
    for axes in places[len(curves) :]:
        axes.remove()
    for axes, curve in zip(places, curves, strict=False):
        marker = "o" if len(curve.steps) <= 40 else ""
        axes.plot(curve.steps, curve.values, color=_COLOUR["blue"], marker=marker, markersize=5)
        axes.set_title(curve.title)
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
        if len(curve.steps) == 1:
            axes.set_xlim(curve.steps[0] - 1, curve.steps[0] + 1)
        if curve.from_zero:
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.05 * curve.up_to))
    return figure


def _draw_memory(steps: Mapping[str, Timeline], width: int, one_scale: bool = False) -> Figure:
    rows = [[f"{tier}/{name}" for name, step in steps.items() if step.peak(tier)] for tier in TIERS]
    across = max(map(len, rows))
    if width == _NARROW:
        rows, across = [[cell] for row in rows for cell in row], 1
    # A step alone in its row has all of it.
    layout = [row if len(row) == across else row * across for row in rows if row]
    figure = _figure(width, 240 * len(layout) + 30)
    places: dict[str, Axes] = figure.subplot_mosaic(layout)
    for cell, axes in places.items():
        tier, name = cell.split("/")
        step = steps[name]
        beside = [other for other in steps.values() if other.peak(tier)] if one_scale else [step]
        which = f"\n{name}" if len(steps) == 2 else ""
        axes.set_title(f"{tier}, peak {format_bytes(step.peak(tier) or 0)}{which}", pad=18)
        _draw_tier(axes, step, tier, _top(beside, tier), width // across)
        axes.set_xlim(0, max(other.seconds for other in beside))
        axes.set_xlabel("seconds")
    _add_phase_legend(figure, [phase for step in steps.values() for phase in step.phases])
    return figure


def _top(steps: Sequence[Timeline], tier: str) -> int:
    """Return the highest bytes to show: the largest of the peaks, and of the capacities that are not far away."""
    peak = max(step.peak(tier) or 0 for step in steps)
    capacities = [step.capacity.get(tier) or 0 for step in steps]
    return max([peak, *(capacity for capacity in capacities if capacity <= _FAR * peak)])


def _draw_tier(axes: Axes, step: Timeline, tier: str, top: int, columns: int) -> None:
    unit, unit_name = next(
        (1024**p, u) for p, u in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB"), (0, "B")) if top >= 1024**p
    )
    _draw_phases(axes, step.phases)
    low, high = memory_columns(step.memory[tier], step.seconds, columns)
    # Where memory changes within a column, the lighter tone reaches its highest value and the darker its lowest.
    for values, style in ((high, {"alpha": 0.35}), (low, {"alpha": 0.5})):
        _fill(axes, [value / unit for value in values], step.seconds, color=_COLOUR["blue"], linewidth=0, **style)
    axes.set_ylim(0, top / unit * 1.08)
    axes.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g} {unit_name}")
    capacity = step.capacity.get(tier)
    if capacity is not None and capacity <= top:
        axes.axhline(capacity / unit, color=_COLOUR["red"], linestyle="--", linewidth=1.5)
        near_top = capacity > 0.8 * top
        axes.annotate(
            f"capacity {format_bytes(capacity)}",
            (1, capacity / unit),
            xycoords=axes.get_yaxis_transform(),
            xytext=(-4, -4 if near_top else 4),
            textcoords="offset points",
            ha="right",
            va="top" if near_top else "bottom",
            color=_COLOUR["red"],
            bbox={"facecolor": _COLOUR["paper"], "alpha": 0.8, "linewidth": 0, "pad": 1},
        )


def _fill(axes: Axes, values: Sequence[float], end: float, **style: Any) -> None:
    """Fill columns of time from 0 to second `end`; equal neighbours are one."""
    starts = [i for i, value in enumerate(values) if i == 0 or value != values[i - 1]]
    edges = [end * i / len(values) for i in [*starts, len(values)]]
    axes.stairs([values[i] for i in starts], edges, fill=True, **style)


def _draw_phases(axes: Axes, phases: Sequence[Phase]) -> None:
    """Draw each phase as a band behind the chart, and a strip above it."""
    for name, colour in _PHASE_COLOURS.items():
        for low, high, alpha in ((0.0, 1.0, 0.08), (1.02, 1.07, 0.7)):
            boxes = [
                Outline([(p.begin, low), (p.end, low), (p.end, high), (p.begin, high), (0, 0)], closed=True)
                for p in phases if p.name == name
            ]  # fmt: skip
            if boxes:  # one element for all, as there may be hundreds
                outline = Outline.make_compound_path(*boxes)
                axes.add_patch(
                    PathPatch(
                        outline, transform=axes.get_xaxis_transform(), color=_COLOUR[colour], alpha=alpha, linewidth=0,
                        clip_on=False, zorder=0.5,
                    )
                )  # fmt: skip


def _add_phase_legend(figure: Figure, phases: Sequence[Phase]) -> None:
    shown = {phase.name for phase in phases}
    if shown:
        keys = [Patch(color=_COLOUR[c], alpha=0.7, label=name) for name, c in _PHASE_COLOURS.items() if name in shown]
        across = 3 if figure.get_figwidth() < _WIDE / 72 else len(keys)
        figure.legend(handles=keys, loc="outside upper left", ncols=across, handlelength=1, handleheight=1,
                      columnspacing=1.2, handletextpad=0.5)  # fmt: skip


def _draw_holders(step: Timeline, held: Mapping[str, Mapping[str, int]], width: int) -> Figure:
    rows = [len(shares) for shares in held.values()]
    if width == _NARROW:
        figure = _figure(width, 40 * sum(rows) + 45 * len(rows))
        places = figure.subplots(len(rows), 1, squeeze=False, height_ratios=rows)[:, 0]
    else:
        figure = _figure(width, 40 * max(rows) + 45)
        places = figure.subplots(1, max(2, len(rows)), squeeze=False)[0]
    for axes in places[len(rows) :]:
        axes.remove()
    for axes, (tier, shares) in zip(places, held.items(), strict=False):
        total, occupied = sum(shares.values()), sum(n for name, n in shares.items() if name != "free")
        axes.set_title(f"{tier}, peak {format_bytes(step.peak(tier) or 0)}")
        axes.set_axis_off()
        axes.set_xlim(0, 1)
        axes.set_ylim(len(shares) if width == _NARROW else max(rows), 0)
        for row, (name, nbytes) in enumerate(shares.items()):
            is_free = name == "free"
            axes.barh(row + 0.6, 0.62, 0.3, color=_COLOUR["rule"])
            axes.barh(row + 0.6, 0.62 * nbytes / total, 0.3, color=_COLOUR["grey" if is_free else "blue"])
            axes.text(0, row + 0.36, name, va="bottom")
            share = f"{nbytes / occupied:.0%}" if nbytes >= 0.01 * occupied else "<1%"
            axes.text(
                0.65,
                row + 0.6,
                format_bytes(nbytes) if is_free else f"{format_bytes(nbytes)}, {share}",
                va="center",
                color=_COLOUR["soft"],
            )
    return figure


def _draw_lanes(step: Timeline, width: int) -> Figure:
    lanes = [lane for lane in LANE_NAMES if step.lanes.get(lane)]
    figure = _figure(width, 44 * len(lanes) + 90)
    axes = figure.subplots()
    _draw_phases(axes, step.phases)
    for row, lane in enumerate(reversed(lanes)):
        shares = busy_shares(step.lanes[lane], step.seconds, width)
        # A lane that works at all in a column is seen.
        heights = [row + 0.1 + max(0.8 * share, 0.03) if share else row + 0.1 for share in shares]
        _fill(axes, heights, step.seconds, baseline=row + 0.1, color=_COLOUR[_LANE_COLOURS[lane]], linewidth=0)
        for begin, end, label in step.lanes[lane]:
            if (end - begin) / step.seconds * (width - 80) > 8 * len(label) + 8:
                axes.text((begin + end) / 2, row + 0.5, label, ha="center", va="center", color=_COLOUR["paper"])
    axes.set_yticks([row + 0.5 for row in range(len(lanes))], list(reversed(lanes)))
    axes.tick_params(axis="y", labelcolor=_COLOUR["ink"])
    axes.grid(False)
    axes.set_xlim(0, step.seconds)
    axes.set_ylim(0, len(lanes))
    axes.set_xlabel("seconds")
    _add_phase_legend(figure, step.phases)
    return figure
