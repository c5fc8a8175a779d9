"""`trunkline doctor`: check everything that training depends on, and say how to fix problems."""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from trunkline.cli.options import command

if TYPE_CHECKING:
    from trunkline.plan.checks.finding import Finding, State

    Findings = Sequence[tuple[str, Finding]]

_STYLES: dict[State, str] = {"ok": "green", "warn": "yellow", "fail": "bold red"}
_NAME = 14  # columns of a name; a device with a number of two digits
_INDENT = 2 + 4 + 2 + _NAME + 2


@command(epilog="docs/doctor.md explains each line. Exit code: 1 if a check fails, else 0.")
def doctor(
    disk: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder whose speed is measured; default: the one for temporary files."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> int:
    """Check everything that training depends on, and say how to fix problems."""
    from trunkline.plan.checks.everything import examine

    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0  # the first process of each machine examines it, undisturbed
    console = Console()
    with _waiting(console, not as_json):
        findings = list(examine(Path(tempfile.gettempdir()) if disk is None else disk))
    if as_json:
        print(as_text(findings))
    else:
        show(findings, console)
    return 1 if any(finding.state == "fail" for _, finding in findings) else 0


def as_text(findings: Findings) -> str:
    """JSON of the findings: `{"ok": …, "findings": [{"section", "name", "state", "found", "mend"}, …]}`."""
    content = {
        "ok": all(finding.state != "fail" for _, finding in findings),
        "findings": [{"section": section, **asdict(finding)} for section, finding in findings],
    }
    return json.dumps(content, indent=2, ensure_ascii=False)


def show(findings: Findings, console: Console) -> None:
    """Print findings: aligned and coloured on a terminal, otherwise a line for each and one for each mend.

    Args:
        findings: each with the title of its section.
        console: where.
    """
    last = None
    for section, finding in findings:
        if section != last:
            if last is not None:
                console.print()
            console.print(Text(section, style="bold"))
            last = section
        if console.is_terminal:
            console.print(_row(finding))
        else:
            for line in _lines(finding):
                console.print(line, markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.print(summary([finding for _, finding in findings]), highlight=False, soft_wrap=True, style="bold")


def summary(findings: Sequence[Finding]) -> str:
    """The closing line."""
    counts = {state: sum(finding.state == state for finding in findings) for state in _STYLES}
    text = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    return f"{text}: {'this has to be mended before training' if counts['fail'] else 'ready to train'}."


def _row(finding: Finding) -> RenderableType:
    """A finding in columns; what does not fit goes on below its own column, and so does the mend."""
    table = Table.grid(padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(width=4, no_wrap=True)
    table.add_column(width=_NAME, no_wrap=True)
    table.add_column(overflow="fold")
    colour = _STYLES[finding.state]
    table.add_row(Text(finding.state, style=colour), Text(finding.name), Text(finding.found))
    if finding.mend is not None:
        mend = Table.grid(padding=(0, 1, 0, 0), pad_edge=False)
        mend.add_row(Text("→", style=colour), Text(finding.mend, overflow="fold"))
        table.add_row("", "", mend)
    return Padding(table, (0, 0, 0, 2))


def _lines(finding: Finding) -> Iterator[str]:
    yield f"  {finding.state:<4}  {finding.name:<{_NAME}}  {finding.found}"
    if finding.mend is not None:
        yield f"{'':{_INDENT}}→ {finding.mend}"


@contextlib.contextmanager
def _waiting(console: Console, wanted: bool) -> Iterator[None]:
    """Show that something goes on, on a terminal."""
    if wanted and console.is_terminal:
        with console.status("Looking at this machine …"):
            yield
    else:
        yield
