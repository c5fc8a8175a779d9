"""`trunkline report`: write the page of a run and list its files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trunkline.cli.options import command, short_path

_CONTENTS = {
    "index.html": "the page: open it in a browser, send it as it is",
    "trace.json": "lanes and memory for https://ui.perfetto.dev",
}


@command(epilog="Files that a run's folder may hold, and how each figure is counted: docs/report.md.")
def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a run, such as the output of trunkline train.")],
    output: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Folder to write; default: report in the run's folder.")
    ] = None,
) -> None:
    """Write a page about a training run or an estimated step: one HTML file, pictures, a trace."""
    from trunkline.report import write_report

    written = write_report(run, output)
    print(f"Wrote {short_path(written.folder)}/")
    width = max(map(len, written.files))
    for name in written.files:
        print(f"  {name:{width}}  {_CONTENTS.get(name, 'a chart as a picture')}")
