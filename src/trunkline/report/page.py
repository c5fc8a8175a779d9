"""The page: one HTML file that needs nothing else, with style, script and drawings inside."""

from __future__ import annotations

from importlib.resources import files

from trunkline.report.curves import draw_curve
from trunkline.report.folder import Run
from trunkline.report.headline import headline
from trunkline.report.lanes import drawn_lanes
from trunkline.report.sections import compared, evaluated, holders, lanes, memory
from trunkline.report.svg import element
from trunkline.report.words import escape

MARK = '<meta name="generator" content="trunkline report">'
# Whatever a title or a label may be, the page can load nothing.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def make_page(run: Run) -> str:
    """Return the page of a run.

    Args:
        run: what its folder holds; parts that are absent are left out.

    Returns:
        HTML, the same for the same run.
    """
    sections = [
        _cards(run),
        _curves(run),
        evaluated(run),
        memory(run) if run.timeline or run.before else "",
        holders(run.timeline) if run.timeline else "",
        lanes(run.timeline) if run.timeline and drawn_lanes(run.timeline) else "",
        compared(run),
        _recipe(run.recipe),
    ]
    title = escape(run.title)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"{MARK}\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title} · Trunkline</title>\n<style>\n{_resource('page.css')}</style>\n</head>\n<body>\n"
        f'<header><div><p class="kind">{escape(_kind(run))}</p><h1>{title}</h1></div>'
        '<button id="theme" type="button" hidden>light or dark</button></header>\n<main>\n'
        + "\n".join(section for section in sections if section)
        + f'\n</main>\n<div id="tip" role="status" hidden></div>\n<script>\n{_resource("page.js")}</script>\n'
        "</body>\n</html>\n"
    )


def _resource(name: str) -> str:
    return files("trunkline.report").joinpath(name).read_text(encoding="utf-8")


def _kind(run: Run) -> str:
    if run.timeline is None:
        return "A training run" if run.history else "A plan"
    step = "measured" if run.timeline.source == "measured" else "rehearsed on virtual hardware"
    return f"A training run, and one step {step}" if run.history else f"One step, {step}"


def _cards(run: Run) -> str:
    cards = []
    for figure in headline(run):
        content = element("dt", escape(figure.name)) + element("dd", escape(figure.value), class_="value")
        if figure.share is not None:
            content += f'<dd class="meter"><i style="width:{figure.share:.1%}"></i></dd>'
        if figure.note:
            content += element("dd", escape(figure.note), class_="note")
        cards.append(element("div", content, class_="card"))
    return element("dl", "".join(cards), class_="cards") if cards else ""


def _curves(run: Run) -> str:
    charts = [element("figure", element("figcaption", escape(curve.title)) + draw_curve(curve)) for curve in run.curves]
    if not charts:
        return ""
    return element("section", element("h2", "Over the steps") + element("div", "".join(charts), class_="grid"))


def _recipe(recipe: str | None) -> str:
    if not recipe:
        return ""
    shown = element("details", element("summary", "recipe.yaml") + element("pre", escape(recipe)))
    return element("section", element("h2", "Settings") + shown)
