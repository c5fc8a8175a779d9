"""Files of an evaluation: tables, JSON, CSV and plots in a folder."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from trunkline.evaluate.evaluation import Evaluation, ScoreCell, with_perplexity
from trunkline.evaluate.outcomes import WAYS, Way
from trunkline.evaluate.score_plots import can_draw, write_heatmap, write_perplexity
from trunkline.evaluate.score_tables import table_text
from trunkline.utils.atomic_dir import atomic_dir

_TABLE, _JSON, _CSV = "table.txt", "results.json", "results.csv"
_PERPLEXITY_CSV, _PERPLEXITY_PNG = "perplexity.csv", "perplexity.png"
_HEATMAPS: dict[Way, str] = {way: f"heatmap-{way}.png" for way in WAYS}
_FILES = {_TABLE, _JSON, _CSV, _PERPLEXITY_CSV, _PERPLEXITY_PNG, *_HEATMAPS.values()}


@dataclass(frozen=True)
class WrittenEvaluation:
    """Files that were written: their folder, their names, and notes about files that were left out."""

    folder: Path
    files: list[str]
    notes: list[str]


def write_evaluation(evaluation: Evaluation, folder: Path) -> WrittenEvaluation:
    """Write the files of an evaluation that are not empty; table.txt and results.json are always written.

    Args:
        evaluation: the evaluation.
        folder: folder to write into. It is created if missing; files of the same names are replaced, others stay.

    Returns:
        The files written. Without matplotlib there are no PNGs, and a note says so.

    Raises:
        ValueError: the folder is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"output: '{folder}' is a file. Set the name of a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    files, notes = [_TABLE, _JSON], []
    (folder / _TABLE).write_text(table_text(evaluation), encoding="utf-8")
    (folder / _JSON).write_text(evaluation.to_json(), encoding="utf-8")
    if evaluation.outcomes:
        columns = [field.name for field in fields(ScoreCell)]
        files.append(_write_csv(folder / _CSV, columns, map(asdict, evaluation.cells())))
    if evaluation.by_document:
        rows = [with_perplexity(loss) for loss in evaluation.by_position]
        rows += [{"document": loss.name, **with_perplexity(loss)} for loss in evaluation.by_document]
        columns = ["document", "first", "last", "num_tokens", "loss", "perplexity"]
        files.append(_write_csv(folder / _PERPLEXITY_CSV, columns, rows))
    if can_draw():
        for way in evaluation.ways:
            write_heatmap(evaluation, way, folder / _HEATMAPS[way])
            files.append(_HEATMAPS[way])
        if evaluation.by_position:
            write_perplexity(evaluation, folder / _PERPLEXITY_PNG)
            files.append(_PERPLEXITY_PNG)
    else:
        notes.append("No PNGs: matplotlib is not installed (pip install 'trunkline[report]').")
    return WrittenEvaluation(folder, files, notes)


def write_folder(evaluation: Evaluation, folder: Path, *, overwrite: bool = False) -> WrittenEvaluation:
    """Write an evaluation into a folder of its own, which appears when it is complete.

    Args:
        evaluation: the evaluation.
        folder: new or empty folder, or with `overwrite` the folder of an earlier evaluation, which is replaced.
        overwrite: replace an earlier evaluation.

    Raises:
        ValueError: the folder may not be replaced.
    """
    folder = folder.expanduser().absolute()
    check_folder(folder, overwrite=overwrite)
    with atomic_dir(folder) as partial:
        written = write_evaluation(evaluation, partial)
    return WrittenEvaluation(folder, written.files, written.notes)


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that `write_folder` would refuse, before hours of evaluation.

    Args:
        folder: folder of the evaluation.
        overwrite: replace an earlier evaluation.

    Raises:
        ValueError: the folder is not empty and may not be replaced.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: '{folder}' is a file. Give the name of a folder.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not overwrite:
        raise ValueError(f"--output: the folder '{folder}' exists. Give another one, or --overwrite to replace it.")
    others = sorted(names - _FILES) or (sorted(names) if _JSON not in names else [])
    if others:
        raise ValueError(
            f"--output: '{folder}' holds '{others[0]}', which is no part of an evaluation, and --overwrite replaces "
            "only evaluations. Give another folder."
        )


def _write_csv(path: Path, columns: list[str], rows: Iterable[dict[str, Any]]) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    return path.name
