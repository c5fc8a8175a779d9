"""Writes an evaluation: into a folder that is there, or as a folder of its own that is whole or not there."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from trunkline.evaluate.heatmap import can_draw, write_heatmap, write_perplexity
from trunkline.evaluate.results import Evaluation
from trunkline.evaluate.scoring import WAYS, Way
from trunkline.evaluate.table import table_text
from trunkline.utils.atomic_dir import replace_dir

TABLE, JSON, CSV, PERPLEXITY_CSV, PERPLEXITY_PNG = (
    "table.txt", "results.json", "results.csv", "perplexity.csv", "perplexity.png",
)  # fmt: skip
_HEATMAPS: dict[Way, str] = {way: f"heatmap-{way}.png" for way in WAYS}
_FILES = {TABLE, JSON, CSV, PERPLEXITY_CSV, PERPLEXITY_PNG, *_HEATMAPS.values()}


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
            name = _HEATMAPS[way]
            write_heatmap(evaluation, way, folder / name)
            files.append(name)
        if evaluation.by_position:
            write_perplexity(evaluation, folder / PERPLEXITY_PNG)
            files.append(PERPLEXITY_PNG)
    else:
        notes.append("No PNGs: matplotlib is not installed (pip install 'trunkline[report]').")
    return WrittenEvaluation(folder, files, notes)


def write_folder(evaluation: Evaluation, folder: Path, *, overwrite: bool = False) -> WrittenEvaluation:
    """Write an evaluation into a folder of its own: it is there when it is complete.

    Args:
        evaluation: what was found.
        folder: new or empty, or with `overwrite` that of an earlier evaluation, which goes.
        overwrite: whether it may.

    Returns:
        What was written.

    Raises:
        ValueError: the folder may not be replaced.
    """
    folder = folder.expanduser().absolute()
    check_folder(folder, overwrite=overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f"{folder.name}.partial-{os.getpid()}")
    try:
        written = write_evaluation(evaluation, partial)
        replace_dir(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return WrittenEvaluation(folder, written.files, written.notes)


def check_folder(folder: Path, *, overwrite: bool = False) -> None:
    """Refuse a folder that `write_folder` would not write, long before there is something to write.

    Args:
        folder: where an evaluation is to go.
        overwrite: whether an earlier evaluation may be replaced.

    Raises:
        ValueError: it is there and not empty, and may not be replaced.
    """
    folder = folder.expanduser()
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"--output: '{folder}' is a file. Give the name of a folder.")
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not overwrite:
        raise ValueError(f"--output: the folder '{folder}' exists. Give another one, or --overwrite to replace it.")
    others = sorted(name for name in names if name not in _FILES)
    if others or (names and JSON not in names):
        what = others[0] if others else sorted(names)[0]
        raise ValueError(
            f"--output: '{folder}' holds '{what}', which is no part of an evaluation, and --overwrite replaces only "
            "those. Give another folder."
        )
