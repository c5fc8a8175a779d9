"""Writes a report: all of it or nothing, and never over something that is no report."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from trunkline.report.folder import read_run
from trunkline.report.page import MARK, make_page
from trunkline.report.png import NAMES, can_draw, write_pngs
from trunkline.report.trace import make_trace
from trunkline.utils.atomic_dir import replace_dir

PAGE, TRACE, FOLDER = "index.html", "trace.json", "report"


@dataclass(frozen=True)
class Written:
    """What a report consists of.

    Attributes:
        folder: of the report.
        files: names in it.
        notes: what was left out, and how it would not be.
    """

    folder: Path
    files: list[str]
    notes: list[str]


def write_report(run: Path, output: Path | None = None) -> Written:
    """Write the report of a run.

    Args:
        run: folder with some of metrics.jsonl, recipe.yaml, timeline.json, plan.json and before.json.
        output: folder to write; None for `report` in the run's. An earlier report there is replaced.

    Returns:
        What was written.

    Raises:
        ValueError: the run holds nothing to report, a file in it is broken, or the output may not be replaced.
    """
    found = read_run(run)
    folder = (output if output is not None else run / FOLDER).expanduser().resolve()
    _check(folder)
    notes = []
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        (partial / PAGE).write_text(make_page(found), encoding="utf-8")
        if found.timeline is not None:
            (partial / TRACE).write_text(make_trace(found.timeline, found.before), encoding="utf-8")
        if can_draw():
            write_pngs(found, partial)
        else:
            notes.append("No PNGs: matplotlib is not installed (pip install 'trunkline[report]').")
        files = sorted(path.name for path in partial.iterdir())
        replace_dir(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return Written(folder, files, notes)


def _check(folder: Path) -> None:
    """Refuse to replace anything but an empty folder and a report."""
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"output: '{folder}' is a file. Set --output to the name of a folder.")
    names = {path.name for path in folder.iterdir()}
    others = sorted(names - {PAGE, TRACE, *NAMES})
    page = folder / PAGE
    is_report = page.is_file() and MARK in page.read_text(encoding="utf-8", errors="replace")[:1000]
    if others or (names and not is_report):
        what = f"'{others[0]}'" if others else "files"
        raise ValueError(
            f"output: '{folder}' holds {what} that no report consists of, and only reports are replaced. Set --output "
            "to another folder."
        )
