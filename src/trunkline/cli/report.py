"""`trunkline report`: write the page of a run, and say where it is."""

from __future__ import annotations

import os
from pathlib import Path

from trunkline.report import write_report

_CONTENTS = {
    "index.html": "the page: open it in a browser, send it as it is",
    "trace.json": "lanes and memory for https://ui.perfetto.dev",
}


def run_report(run: Path, output: Path | None) -> None:
    """Write the report and list what it consists of.

    Args:
        run: folder of a run.
        output: folder of the report; None for `report` in the run's.
    """
    written = write_report(run, output)
    relative = os.path.relpath(written.folder)
    print(f"Wrote {written.folder if relative.startswith('..') else relative}/")
    width = max(map(len, written.files))
    for name in written.files:
        print(f"  {name:{width}}  {_CONTENTS.get(name, 'a chart as a picture')}")
    for note in written.notes:
        print(note)
