"""Tables of an evaluation, for the terminal and for a text file."""

from __future__ import annotations

from io import StringIO
from typing import TYPE_CHECKING

from trunkline.evaluate.evaluation import Evaluation
from trunkline.evaluate.evaluation_settings import length_text
from trunkline.evaluate.outcomes import Way
from trunkline.evaluate.perplexity import MeanLoss

if TYPE_CHECKING:
    from rich.table import Table

WAY_TITLES: dict[Way, str] = {"forced": "teacher-forced", "generated": "generated"}


def tables_of(evaluation: Evaluation) -> list[Table]:
    """Return the tables that are not empty: scores of each way, perplexity by position and by document."""
    tables = [_scores(evaluation, way) for way in evaluation.ways]
    if evaluation.by_position:
        table = _table("Perplexity by position", ["positions", "tokens", "loss", "perplexity"])
        for bin_ in evaluation.by_position:
            place = f"{bin_.first:,}" if bin_.first == bin_.last else f"{bin_.first:,} to {bin_.last:,}"
            table.add_row(place, *_loss_cells(bin_))
        tables.append(table)
    if evaluation.by_document:
        table = _table("Perplexity by document", ["document", "tokens", "loss", "perplexity"])
        for loss in evaluation.by_document:
            table.add_row(loss.name, *_loss_cells(loss))
        if evaluation.mean_loss is not None and len(evaluation.by_document) > 1:
            table.add_section()
            table.add_row("all tokens", *_loss_cells(evaluation.mean_loss))
        tables.append(table)
    return tables


def table_text(evaluation: Evaluation) -> str:
    """Return all tables as plain text, without wrapped lines."""
    from rich.console import Console

    text = StringIO()
    Console(file=text, width=10_000, color_system=None).print(*tables_of(evaluation), sep="\n")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _table(title: str, columns: list[str]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _loss_cells(loss: MeanLoss) -> tuple[str, str, str]:
    return f"{loss.num_tokens:,}", f"{loss.loss:.4f}", f"{loss.perplexity:,.3f}"


def _scores(evaluation: Evaluation, way: Way) -> Table:
    mean = evaluation.length_scores(way)
    lengths = sorted(mean)
    columns = ["task", *map(length_text, lengths), f"effective at {evaluation.settings.threshold:.0%}"]
    table = _table(f"Answers retrieved, {WAY_TITLES[way]}", columns)

    def add(name: str, scores: dict[int, float], effective: int | None) -> None:
        # The model may reach further than the longest length tried, or less far than the shortest.
        reach = f"below {length_text(lengths[0])}" if effective is None else length_text(effective)
        reach += " or more" if effective == lengths[-1] else ""
        table.add_row(name, *(f"{scores[length]:.1%}" for length in lengths), reach)

    for task, scores in evaluation.task_scores(way).items():
        add(task, scores, evaluation.effective_length(way, task))
    table.add_section()
    add("mean", mean, evaluation.effective_length(way))
    return table
