"""Writes an evaluation into a folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trunkline.evaluate.heatmap import can_draw, write_heatmap, write_perplexity
from trunkline.evaluate.results import Evaluation
from trunkline.evaluate.table import table_text

TABLE, JSON, CSV, PERPLEXITY_CSV, PERPLEXITY_PNG = (
    "table.txt", "results.json", "results.csv", "perplexity.csv", "perplexity.png",
)  # fmt: skip


@dataclass(frozen=True)
class WrittenEvaluation:
    """What was written.

    Attributes:
        folder: where.
        files: names in it.
        notes: what was left out, and how it would not be.
    """

    folder: Path
    files: list[str]
    notes: list[str]


def write_evaluation(evaluation: Evaluation, folder: Path) -> WrittenEvaluation:
    """Write tables and pictures of an evaluation.

    Args:
        evaluation: what was found.
        folder: made where it is not there; files of the same names in it are replaced, others stay.

    Returns:
        What was written: table.txt and results.json always, the rest where there is something for it.

    Raises:
        ValueError: the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: '{folder}' is a file. Set the name of a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    texts = {TABLE: table_text(evaluation), JSON: evaluation.to_json()}
    if evaluation.outcomes:
        texts[CSV] = evaluation.to_csv()
    if evaluation.by_document:
        texts[PERPLEXITY_CSV] = evaluation.perplexity_csv()
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files, notes = list(texts), []
    if can_draw():
        for way in evaluation.ways:
            name = f"heatmap-{way}.png"
            write_heatmap(evaluation, way, folder / name)
            files.append(name)
        if evaluation.by_position:
            write_perplexity(evaluation, folder / PERPLEXITY_PNG)
            files.append(PERPLEXITY_PNG)
    else:
        notes.append("No PNGs: matplotlib is not installed (pip install 'trunkline[report]').")
    return WrittenEvaluation(folder, files, notes)
