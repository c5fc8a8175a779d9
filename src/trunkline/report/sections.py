"""Sections of the page: memory of one step, what holds it, lanes, the plan beside what was measured, evaluations."""

from __future__ import annotations

import json
from collections.abc import Callable

from trunkline.report.comparison import compare, measured
from trunkline.report.evaluations import score_rows
from trunkline.report.folder import Run
from trunkline.report.lanes import draw_lanes, lane_data, lane_totals
from trunkline.report.memory import draw_memory, highest, shares_of
from trunkline.report.svg import element
from trunkline.report.timeline import PHASES, Timeline
from trunkline.report.words import bytes_text, escape, percent_text, seconds_text
from trunkline.units import TIERS

WIDE, HALF, NARROW = 960, 540, 400


def _responsive(draw: Callable[[int], str], wide: int = WIDE) -> str:
    """Return a drawing twice, for wide and for narrow screens, so that its text keeps its size on both."""
    return element("div", draw(wide), class_="wide") + element("div", draw(NARROW), class_="narrow")


def memory(run: Run) -> str:
    """Return the charts of memory through the step, beside the unchunked step's where there is one.

    Args:
        run: with a timeline, a step before, or both.
    """
    figures = []
    for tier in TIERS:
        shown = [t for t in (run.before, run.timeline) if t is not None and t.peak(tier)]
        if len(shown) == 2:
            figures.append(_pair(tier, shown[0], shown[1]))
        elif shown:
            figures.append(_alone(tier, shown[0], "before, unchunked" if shown[0] is run.before else ""))
    if not figures:
        return ""
    source = _source_note(run.timeline) if run.timeline else ""
    note = source + (
        "All that is held, parameters too, on one device and its host. Where more happens in a pixel than it can show, "
        "the darker tone reaches up to the lowest of it and the lighter one to the highest."
    )
    content = element("h2", "Memory through one step") + element("p", note) + _phases(run) + "".join(figures)
    return element("section", content)


def _phases(run: Run) -> str:
    """Return what the colours of the bands mean: most are too narrow for their name."""
    shown = {phase.name for step in (run.before, run.timeline) if step for phase in step.phases}
    keys = [element("li", element("i", class_=name) + name) for name in PHASES if name in shown]
    return element("ul", "".join(keys), class_="phases") if keys else ""


def _alone(tier: str, timeline: Timeline, which: str) -> str:
    chart = _drawn(timeline, tier, highest([timeline], tier), timeline.seconds)
    caption = f"<b>{tier}</b>{f', {which}' if which else ''}{_peak_note(timeline, tier)}"
    return element("figure", element("figcaption", caption) + chart)


def _drawn(timeline: Timeline, tier: str, most: int, seconds: float, wide: int = WIDE) -> str:
    return _responsive(lambda width: draw_memory(timeline, tier, width, most=most, seconds=seconds), wide)


def _pair(tier: str, before: Timeline, after: Timeline) -> str:
    """Return both steps on one scale, and a switch to each on its own."""
    panels = []
    for timeline, name in ((before, "before: unchunked, gradient checkpointing"), (after, "after: in chunks")):
        same = _drawn(timeline, tier, highest([before, after], tier), max(before.seconds, after.seconds), HALF)
        own = _drawn(timeline, tier, highest([timeline], tier), timeline.seconds, HALF)
        caption = element("figcaption", f"<b>{tier}</b>, {name}{_peak_note(timeline, tier)}")
        drawings = element("div", same, class_="same") + element("div", own, class_="own")
        panels.append(element("figure", caption + drawings))
    switch = (
        f'<label class="switch"><input type="checkbox" class="own-scale"> each {tier} chart on its own scale</label>'
    )
    return element("div", switch + element("div", "".join(panels), class_="grid"), class_="pair")


def _source_note(timeline: Timeline) -> str:
    return "Measured. " if timeline.source == "measured" else "Rehearsed on virtual hardware. "


def _peak_note(timeline: Timeline, tier: str) -> str:
    return f", peak {bytes_text(timeline.peak(tier) or 0)}"


def holders(timeline: Timeline) -> str:
    """Return a stacked bar for each tier: what holds its bytes when it is fullest."""
    figures = []
    for tier in TIERS:
        shares = shares_of(timeline, tier)
        total = sum(share.nbytes for share in shares)
        if not total:
            continue
        held = sum(share.nbytes for share in shares if share.colour is not None)
        bar, legend = [], []
        for number, share in enumerate(shares, start=1):
            part = share.nbytes / total
            colour = "free" if share.colour is None else f"c{share.colour}"
            mark = str(number) if part > 0.035 and share.colour is not None else ""
            tip = f"{share.name}: {bytes_text(share.nbytes)}"
            bar.append(element("i", mark, class_=colour, style=f"width:{part:.3%}", title=tip))
            share_text = "" if share.colour is None else f", {percent_text(share.nbytes / held)}"
            key = element("i", "" if share.colour is None else str(number), class_=colour)
            legend.append(
                element("li", f"{key}<span>{escape(share.name)}<b>{bytes_text(share.nbytes)}{share_text}</b></span>")
            )
        caption = element("figcaption", f"<b>{tier}</b>{_peak_note(timeline, tier)}")
        stack = element("div", "".join(bar), class_="stack")
        figures.append(element("figure", caption + stack + element("ul", "".join(legend), class_="legend")))
    if not figures:
        return ""
    return element("section", element("h2", "What holds the peak") + "".join(figures))


def lanes(timeline: Timeline) -> str:
    """Return the lanes over time with their controls, and what each did in all.

    Args:
        timeline: with lanes that have segments.
    """
    data = lane_data(timeline)
    count = sum(len(segments) for segments in timeline.lanes.values())
    note = _source_note(timeline) + (
        f"{count:,} pieces of work. Where several share a pixel, the height says how much of it the lane was busy. "
    )
    if data["merged"]:
        note += (
            f"Those that begin within {seconds_text(data['merged'])} of each other are drawn as one here; "
            "trace.json has them all. "
        )
    controls = (
        '<div class="controls" hidden>'
        '<button type="button" data-zoom="0.5">zoom in</button><button type="button" data-zoom="2">zoom out</button>'
        '<button type="button" data-zoom="all">whole step</button>'
        "<span>Drag to move, Ctrl and wheel to zoom (the wheel alone after a click), or arrow keys, + and -.</span>"
        "</div>"
    )
    written = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # A label may hold the end of a script element.
    script = f'<script type="application/json">{written.replace("<", chr(92) + "u003c")}</script>'
    chart = f'<div class="lanes">{_responsive(lambda width: draw_lanes(timeline, width))}{script}</div>'
    figure = element("figure", controls + chart)
    return element("section", element("h2", "Lanes") + element("p", note) + figure + _totals(timeline))


def _totals(timeline: Timeline) -> str:
    rows = []
    for lane in lane_totals(timeline):
        speed = lane.moved / lane.busy / 1e9 if lane.moved and lane.busy else None
        cells = [
            lane.name,
            "" if lane.busy is None else f"{seconds_text(lane.busy)} ({lane.busy / timeline.seconds:.1%})",
            "" if lane.moved is None else bytes_text(lane.moved),
            "" if speed is None else f"{speed:.1f} GB/s",
            "" if lane.exposed is None else f"{seconds_text(lane.exposed)} ({lane.exposed / timeline.seconds:.1%})",
        ]
        rows.append(cells)
    return _table(["lane", "busy", "moved", "while busy", "compute waited for it"], rows)


def compared(run: Run) -> str:
    """Return the table of the plan beside what was measured, nothing without a plan."""
    rows = compare(run)
    if not rows or run.plan is None:
        return ""
    found = measured(run)
    cells = [
        [
            row.name,
            "" if row.predicted is None else row.written(row.predicted),
            "" if row.measured is None else row.written(row.measured),
            "" if row.ratio is None else f"{row.ratio:.2f}",
        ]
        for row in rows
    ]
    source = f"Measured: {found.source}. " if found else "Nothing was measured yet. "
    hardware = f"Planned for {escape(run.plan.hardware)}. " if run.plan.hardware else ""
    heading = element("h2", "Plan and measurement") + element("p", hardware + source)
    return element("section", heading + _table(["", "predicted", "measured", "measured / predicted"], cells))


def evaluated(run: Run) -> str:
    """Return the table of what the last evaluation found, nothing where none asked for anything."""
    if not run.evaluations or not run.evaluations[-1].scores:
        return ""
    last = run.evaluations[-1]
    heads, rows = score_rows(last)
    heading = element("h2", "Evaluation") + element("p", f"After step {last.step:,}, by tokens of a sample.")
    return element("section", heading + _table(heads, rows))


def _table(heads: list[str], rows: list[list[str]]) -> str:
    head = element("tr", "".join(element("th", escape(cell), scope="col") for cell in heads))
    body = "".join(
        element(
            "tr", element("th", escape(cells[0]), scope="row") + "".join(element("td", escape(c)) for c in cells[1:])
        )
        for cells in rows
    )
    table = element("table", element("thead", head) + element("tbody", body))
    return element("div", table, class_="scroll")
