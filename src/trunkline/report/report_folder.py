"""Writing of a report: an atomic folder, which replaces only an empty folder or another report."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from trunkline.report.run_folder import read_run
from trunkline.report.trace import make_trace
from trunkline.utils.atomic_dir import atomic_dir

PAGE, TRACE, FOLDER = "index.html", "trace.json", "report"
PICTURES = ("steps.png", "memory.png", "memory-own-scale.png", "holders.png", "lanes.png")
MARK = '<meta name="generator" content="trunkline report">'


@dataclass(frozen=True)
class WrittenReport:
    """A report on disk.

    Attributes:
        folder: Its folder.
        files: Names of the files in it.
    """

    folder: Path
    files: list[str]


def write_report(run: Path, output: Path | None = None) -> WrittenReport:
    """Write the report of a run: the page, a picture of each chart, and a trace if there is a timeline.

    Args:
        run: Folder of the run; `read_run` names the files that count.
        output: Folder to write; None means `report` in the run's folder. An earlier report there is replaced.

    Raises:
        ValueError: The run holds nothing to report, a file in it is broken, the output may not be replaced, or
            matplotlib or Jinja2 is not installed.
    """
    missing = [name for name, module in (("matplotlib", "matplotlib"), ("Jinja2", "jinja2")) if not find_spec(module)]
    if missing:
        raise ValueError(f"a report needs {' and '.join(missing)}: pip install 'trunkline[report]'.")
    # The record of a step is in this package, too, and needs neither of the two.
    from trunkline.report.charts import charts_of
    from trunkline.report.page import make_page

    found = read_run(run)
    folder = (output if output is not None else run / FOLDER).expanduser().resolve()
    _check(folder)
    charts = charts_of(found)
    with atomic_dir(folder) as partial:
        (partial / PAGE).write_text(make_page(found, charts), encoding="utf-8")
        if found.timeline is not None:
            (partial / TRACE).write_text(make_trace(found.timeline, found.before), encoding="utf-8")
        for chart in charts.values():
            chart.save_png(partial)
        files = sorted(path.name for path in partial.iterdir())
    return WrittenReport(folder, files)


def _check(folder: Path) -> None:
    """Refuse to replace anything but an empty folder and a report."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"output: '{folder}' is a file. Set --output to the name of a folder.")
    names = {path.name for path in folder.iterdir()}
    others = sorted(names - {PAGE, TRACE, *PICTURES})
    page = folder / PAGE
    is_report = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:1000]
    if others or (names and not is_report):
        what = f"'{others[0]}'" if others else "files"
        raise ValueError(
            f"output: '{folder}' holds {what} that no report contains, and only reports are replaced. Set --output "
            "to another folder."
        )
