"""An evaluation as text: tables that a terminal shows and a file keeps."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from trunkline.evaluate.results import Evaluation
from trunkline.evaluate.scoring import Way

if TYPE_CHECKING:
    from rich.table import Table

WAY_TITLES: dict[Way, str] = {"forced": "teacher-forced", "generated": "generated"}


def length_text(length: int) -> str:
    """Return a number of tokens as people say it: 4,096 is 4K, 1,048,576 is 1M, others stay whole."""
    for size, unit in ((2**20, "M"), (2**10, "K")):
        if length % size == 0:
            return f"{length // size}{unit}"
    return f"{length:,}"


def tables_of(evaluation: Evaluation) -> list[Table]:
    """Return the tables that there is something for: scores of each way, perplexity by position and by document.

    Args:
        evaluation: what was found.

    Returns:
        Tables of rich.
    """
    tables = [_scores(evaluation, way) for way in evaluation.ways]
    if evaluation.by_position:
        tables.append(_positions(evaluation))
    if evaluation.by_document:
        tables.append(_documents(evaluation))
    return tables


def table_text(evaluation: Evaluation) -> str:
    """Return all tables as plain text, none of their lines broken.

    Args:
        evaluation: what was found.

    Returns:
        The text.
    """
    from rich.console import Console

    console = Console(file=StringIO(), width=10_000, color_system=None)
    for table in tables_of(evaluation):
        console.print(table)
    file = console.file
    assert isinstance(file, StringIO)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


def _table(title: str, columns: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _scores(evaluation: Evaluation, way: Way) -> Table:
    by_length = evaluation.length_scores(way)
    lengths = sorted(by_length)
    columns = ["task", *map(length_text, lengths), f"effective at {evaluation.settings.threshold:.0%}"]
    table = _table(f"Answers retrieved, {WAY_TITLES[way]}", columns)
    for task, scores in evaluation.task_scores(way).items():
        table.add_row(task, *(f"{scores[n]:.1%}" for n in lengths), _effective(evaluation, way, task))
    table.add_section()
    table.add_row("mean", *(f"{by_length[length]:.1%}" for length in lengths), _effective(evaluation, way, None))
    return table


def _effective(evaluation: Evaluation, way: Way, task: str | None) -> str:
    """The longest length that was tried may be short of what the model can do, and the shortest too much for it."""
    lengths = sorted(evaluation.length_scores(way))
    effective = evaluation.effective_length(way, task)
    if effective is None:
        return f"below {length_text(lengths[0])}"
    return f"{length_text(effective)} or more" if effective == lengths[-1] else length_text(effective)


def _positions(evaluation: Evaluation) -> Table:
    table = _table("Perplexity by position", ["positions", "tokens", "loss", "perplexity"])
    for loss in evaluation.by_position:
        place = f"{loss.first:,}" if loss.first == loss.last else f"{loss.first:,} to {loss.last:,}"
        table.add_row(place, f"{loss.num_tokens:,}", f"{loss.loss:.4f}", f"{loss.perplexity:,.3f}")
    return table


def _documents(evaluation: Evaluation) -> Table:
    table = _table("Perplexity by document", ["document", "tokens", "loss", "perplexity"])
    for loss in evaluation.by_document:
        table.add_row(loss.name, f"{loss.num_tokens:,}", f"{loss.loss:.4f}", f"{loss.perplexity:,.3f}")
    mean = evaluation.mean_loss
    if mean is not None and len(evaluation.by_document) > 1:
        table.add_section()
        table.add_row("all tokens", f"{mean.num_tokens:,}", f"{mean.loss:.4f}", f"{mean.perplexity:,.3f}")
    return table
