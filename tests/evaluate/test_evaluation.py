"""Scores that follow from outcomes, compared with numbers worked out by hand; and the files."""

from __future__ import annotations

import csv
import json
import math

import numpy as np
import pytest

from trunkline.evaluate import (
    DocumentLoss,
    EvaluateSettings,
    Evaluation,
    Outcome,
    PositionLoss,
    effective_length,
    length_text,
    table_text,
    write_evaluation,
)
from trunkline.evaluate.outcomes import contains


def _outcome(task, length, depth, retrieved, way="forced", log_prob=-1.0):
    return Outcome(
        way, task, length, 0, "k", "123", depth, retrieved, log_prob if way == "forced" else None, 4,
        None if way == "forced" else "It is 123.",
    )  # fmt: skip


OUTCOMES = (
    *(_outcome("needle", 4096, depth, True) for depth in (0.0, 0.5, 1.0, 1.0)),
    *(_outcome("needle", 8192, depth, depth > 0, log_prob=-3.0) for depth in (0.0, 0.5, 1.0, 1.0)),
    _outcome("multikey", 4096, 0.5, True),
    _outcome("multikey", 4096, 0.5, False),
    _outcome("multikey", 8192, 0.5, True),
    _outcome("needle", 4096, 0.5, True, "generated"),
)
EVALUATION = Evaluation(
    EvaluateSettings(lengths=(4096, 8192), tasks=("needle", "multikey"), threshold=0.75),
    OUTCOMES,
    (PositionLoss(10, 2.0, 1, 1), PositionLoss(20, 1.0, 2, 3)),
    (DocumentLoss(30, math.log(2.0), "a, \"quoted\" name"), DocumentLoss(0, math.nan, "of one token")),
)  # fmt: skip


def test_scores_by_cell_task_and_length():
    cells = {(c.way, c.task, c.length, c.depth): (c.score, c.num_answers, c.loss) for c in EVALUATION.cells()}
    assert cells["forced", "needle", 4096, 1.0] == (1.0, 2, 0.25)
    assert cells["forced", "needle", 8192, 0.0] == (0.0, 1, 0.75)
    assert cells["forced", "multikey", 4096, 0.5] == (0.5, 2, 0.25)
    assert cells["generated", "needle", 4096, 0.5] == (1.0, 1, None)
    assert EVALUATION.task_scores("forced") == {
        "needle": {4096: 1.0, 8192: 0.75},
        "multikey": {4096: 0.5, 8192: 1.0},
    }
    # Tasks count the same, however many answers they have.
    assert EVALUATION.length_scores("forced") == {4096: 0.75, 8192: 0.875}
    assert EVALUATION.ways == ["forced", "generated"]


def test_effective_length_ends_at_the_first_length_below_the_threshold():
    assert EVALUATION.effective_length("forced") == 8192
    assert EVALUATION.effective_length("forced", "needle") == 8192
    assert EVALUATION.effective_length("forced", "multikey") is None
    assert effective_length({8: 0.9, 4: 0.9, 16: 0.8, 32: 0.95}, 0.85) == 8
    assert effective_length({4: 0.85}, 0.85) == 4
    # 0.7 + 0.1 + 0.1 … is a rounding below what it should be.
    assert effective_length({4: math.nextafter(0.85, 0)}, 0.85) == 4
    assert effective_length({4: 0.849}, 0.85) is None
    assert effective_length({}, 0.85) is None


@pytest.mark.parametrize(
    ("text", "retrieved"),
    [
        ("It is 123.", True),
        ("123", True),
        ("the ABC and aBc", False),
        ("1234", False),
        ("5123", False),
        ("は123です", True),
    ],
)
def test_an_answer_must_be_a_word_of_its_own(text, retrieved):
    assert contains(text, "123") == retrieved
    assert contains("Surely AbC!", "abc")


def test_json_has_all_results_and_null_for_nan():
    found = json.loads(EVALUATION.to_json(), parse_constant=pytest.fail)
    assert found["effective_length"]["forced"] == {"mean": 8192, "tasks": {"needle": 8192, "multikey": None}}
    assert found["length_scores"]["forced"] == {"4096": 0.75, "8192": 0.875}
    assert found["settings"]["tasks"][0] == {
        "kind": "NeedleTask", "name": "needle", "num_digits": 7, "names_per_question": 1, "numbers_per_name": 1,
        "only_facts": False,
    }  # fmt: skip
    assert len(found["answers"]) == len(OUTCOMES)
    assert found["perplexity"]["by_document"][1] == {
        "num_tokens": 0, "loss": None, "name": "of one token", "perplexity": None,
    }  # fmt: skip
    assert found["perplexity"]["by_position"][0]["perplexity"] == pytest.approx(math.e**2)


def test_csv_rows_are_the_cells(tmp_path):
    write_evaluation(EVALUATION, tmp_path)
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert len(rows) == len(EVALUATION.cells()) == 9
    assert rows[0] == {
        "way": "forced", "task": "needle", "length": "4096", "depth": "0.0", "score": "1.0", "num_answers": "1",
        "loss": "0.25",
    }  # fmt: skip
    losses = list(csv.DictReader((tmp_path / "perplexity.csv").open()))
    assert [(row["document"], row["first"], row["last"]) for row in losses] == [
        ("", "1", "1"), ("", "2", "3"), ('a, "quoted" name', "", ""), ("of one token", "", ""),
    ]  # fmt: skip
    assert float(losses[2]["perplexity"]) == pytest.approx(2)


def test_tables_have_scores_and_effective_lengths():
    lines = table_text(EVALUATION).splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert rows["multikey"] == ["multikey", "50.0%", "100.0%", "below", "4K"]
    assert rows["mean"] == ["mean", "100.0%", "4K", "or", "more"]
    assert "  mean        75.0%    87.5%         8K or more" in lines
    assert [length_text(n) for n in (1000, 1024, 1_048_576, 1_000_000)] == ["1,000", "1K", "1M", "1,000,000"]


def test_folder_has_tables_and_plots(tmp_path):
    written = write_evaluation(EVALUATION, tmp_path / "deep" / "folder")
    assert sorted(written.files) == sorted(path.name for path in written.folder.iterdir())
    assert set(written.files) == {
        "table.txt", "results.json", "results.csv", "perplexity.csv", "heatmap-forced.png", "heatmap-generated.png",
        "perplexity.png",
    }  # fmt: skip
    assert written.notes == []
    again = write_evaluation(EVALUATION, tmp_path / "other")
    for name in written.files:
        assert (written.folder / name).read_bytes() == (again.folder / name).read_bytes()
    with pytest.raises(ValueError, match=r"output: .*table.txt' is a file"):
        write_evaluation(EVALUATION, written.folder / "table.txt")


def test_heat_map_cells_have_the_colours_of_their_scores(tmp_path):
    """Read back from the picture: yellow where all was retrieved, dark where nothing was, as viridis has them."""
    from matplotlib import colormaps, image

    depths = [number / 3 for number in range(4)]
    outcomes = [_outcome("needle", length, depth, length == 4096) for length in (4096, 8192) for depth in depths]
    write_evaluation(Evaluation(EVALUATION.settings, tuple(outcomes)), tmp_path)
    picture = image.imread(tmp_path / "heatmap-forced.png")[..., :3]
    found = [abs(picture - colormaps["viridis"](score)[:3]).max(-1) < 0.01 for score in (1.0, 0.0)]
    columns = [np.nonzero(mask.sum(0) > 50)[0] for mask in found]
    # The left column of cells is yellow, the right one dark, and they are as wide to a few pixels.
    assert columns[0][columns[0] < columns[1].min()].size == pytest.approx(columns[1].size, abs=6)
    assert columns[1].size > 80


def test_without_matplotlib_all_but_plots_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr("trunkline.evaluate.evaluation_files.can_draw", lambda: False)
    written = write_evaluation(EVALUATION, tmp_path)
    assert not [name for name in written.files if name.endswith(".png")]
    assert "matplotlib is not installed" in written.notes[0]
