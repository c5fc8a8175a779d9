"""The page: one HTML file that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from trunkline.report.charts import PALETTE, ReportChart
from trunkline.report.run_folder import ReportedRun
from trunkline.report.summary import measured_step, summary_cards
from trunkline.report.tables import lane_table, plan_table, score_table


def make_page(run: ReportedRun, charts: Mapping[str, ReportChart]) -> str:
    """Return the page of a run as HTML, the same for the same run.

    Args:
        run: Contents of its folder; parts that are absent are left out.
        charts: Charts of the run, by name.
    """
    templates = Environment(
        loader=PackageLoader("trunkline.report", ""),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    timeline, last = run.timeline, run.evaluations[-1] if run.evaluations else None
    return templates.get_template("page.html.jinja").render(
        run=run,
        kind=_kind(run),
        palette=PALETTE,
        cards=summary_cards(run),
        charts={name: tuple(map(Markup, chart.svg())) for name, chart in charts.items()},
        evaluation=last,
        scores=score_table(last) if last else None,
        lanes=lane_table(timeline) if timeline else None,
        num_segments=sum(map(len, timeline.lanes.values())) if timeline else 0,
        plan=plan_table(run),
        measured=measured_step(run),
    )


def _kind(run: ReportedRun) -> str:
    if run.timeline is None:
        return "A training run" if run.steps else "A plan"
    step = "measured" if run.timeline.source == "measured" else "estimated on simulated hardware"
    return f"A training run, and one step {step}" if run.steps else f"One step, {step}"
