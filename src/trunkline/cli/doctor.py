"""`trunkline doctor`: check everything that training depends on, and say how to fix problems."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trunkline.cli.console import say
from trunkline.cli.options import command

if TYPE_CHECKING:
    from trunkline.plan.checks import Finding, State

    Findings = Sequence[tuple[str, Finding]]

_STYLES: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NAME = 14  # columns of a name; a device with a number of two digits


@command(epilog="docs/doctor.md explains each line. Exit code: 1 if a check fails, else 0.")
def doctor(
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder whose speed is measured; default: the one for temporary files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check everything that training depends on, and say how to fix problems."""
    from trunkline.plan.checks.examine import examine

    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the first process of each machine checks it, undisturbed
    console = Console()
    waits = console.is_terminal and not as_json
    with console.status("Looking at this machine …") if waits else contextlib.nullcontext():
        findings = list(examine(Path(tempfile.gettempdir()) if disk is None else disk))
    ok = all(finding.state != "fail" for _, finding in findings)
    if as_json:
        content = {"ok": ok, "findings": [{"section": title, **asdict(finding)} for title, finding in findings]}
        print(json.dumps(content, indent=2, ensure_ascii=False))
    else:
        show(findings, console)
    return 0 if ok else 1


def show(findings: Findings, console: Console) -> None:
    """Print findings: aligned and coloured on a terminal, otherwise a line for each finding and for each fix.

    Args:
        findings: each with the title of its section.
        console: where.
    """
    last = ""
    for title, finding in findings:
        if title != last:
            console.print(Text(f"\n{title}" if last else title, style="bold"))
            last = title
        if console.is_terminal:
            console.print(_row(finding))
        else:
            say(console, f"  {finding.state:<4}  {finding.name:<{_NAME}}  {finding.found}")
            if finding.fix:
                say(console, f"{'':{_NAME + 10}}→ {finding.fix}")
    counts = Counter(finding.state for _, finding in findings)
    text = ", ".join(f"{counts[state]} {state}" for state in _STYLES if counts[state])
    end = "fix this before training" if counts["fail"] else "ready to train"
    say(console, f"\n{text}: {end}.", style="bold")


def _row(finding: Finding) -> Table:
    """Return a finding in columns; long text goes on below its own column, and so does the fix."""
    style = _STYLES[finding.state]
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    for width in (0, 4, _NAME, None):
        table.add_column(width=width, overflow="fold")
    table.add_row("", Text(finding.state, style=style), finding.name, Text(finding.found))
    if finding.fix:
        fix = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        fix.add_row(Text("→", style=style), Text(finding.fix, overflow="fold"))
        table.add_row("", "", "", fix)
    return table
