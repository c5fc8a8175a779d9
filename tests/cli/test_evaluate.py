"""`trunkline evaluate`: what it prints where, what it writes, and what mistakes are answered with."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from rich.console import Console

from trunkline.cli import app
from trunkline.cli.evaluate_progress import EvaluationDisplay
from trunkline.cli.evaluate_settings import choose_settings
from trunkline.config import Progress
from trunkline.data.tokenizers import make_byte_tokenizer
from trunkline.evaluate import EvaluateProgress, length_text

TASKS = "needle,passkey,multikey,multiquery,multivalue,variables"


def save(folder: Path, family: str = "llama", **more: Any) -> Path:
    given = {"vocab_size": 258, "eos_token_id": 256, "pad_token_id": 257, **more}
    model = build(family, torch.float32, **given)
    model.generation_config.eos_token_id = 256
    model.save_pretrained(folder)
    make_byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("model"), max_position_embeddings=4096, num_hidden_layers=2)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = app.run(["evaluate", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_tables_files_and_progress(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "book.txt").write_text("It was a dark night. " * 60)
    (tmp_path / "held.txt").write_text("".join(f"{i * i} of {i}\n" for i in range(120)))
    output = tmp_path / "deep" / "out"
    code, out, err = call(
        capsys, model, "--tasks", "needle,passkey", "--lengths", "1.5K,2048", "--depths", 3, "--samples", 2,
        "--generated", "--haystack", tmp_path / "book.txt", "--perplexity", tmp_path / "held.txt",
        "--chunk-size", 256, "--output", output, "--threshold", 0.5,
    )  # fmt: skip
    assert code == 0, err
    for title in ("teacher-forced", "generated", "Perplexity by position", "Perplexity by document"):
        assert title in out
    assert re.search(r"task +1,536 +2K +effective at 50%", out)
    assert "Answers retrieved" not in err
    # One line for each task and length, in the order of work, with the share of tokens that is done.
    told = re.findall(r"(\d+)%  (\d+) of 17 done  (\S+) (\S+)$", err, re.MULTILINE)
    tokens = 2 * 2 * 2 * (1536 + 2048) + (tmp_path / "held.txt").stat().st_size + 1
    done = [0, 4 * 1536, 4 * (1536 + 2048), 4 * (2 * 1536 + 2048), 8 * (1536 + 2048)]
    assert [int(share) for share, *_ in told] == [round(100 * count / tokens) for count in done]
    assert [(count, what, length) for _, count, what, length in told[:4]] == [
        ("0", "needle", "1,536"), ("4", "needle", "2K"), ("8", "passkey", "1,536"), ("12", "passkey", "2K"),
    ]  # fmt: skip
    assert told[4][1] == "16"
    assert re.search(rf"{tokens:,} tokens in [\d.,]+ s, [\d,]+ tokens/s; peak of activations: device", err)
    assert f"wrote {output}/" in err
    assert {path.name for path in output.iterdir()} == {
        "table.txt", "results.json", "results.csv", "perplexity.csv", "heatmap-forced.png", "heatmap-generated.png",
        "perplexity.png",
    }  # fmt: skip
    found = json.loads((output / "results.json").read_text())
    assert (output / "table.txt").read_text() == out
    assert len(found["answers"]) == 2 * 2 * 2 * 2 * 3
    assert found["settings"]["depths"] == [0.0, 0.5, 1.0]
    assert found["perplexity"]["mean"]["num_tokens"] == (tmp_path / "held.txt").stat().st_size
    rows = list(csv.DictReader((output / "results.csv").open()))
    assert len(rows) == 2 * 2 * 2 * 3
    assert [path.name for path in output.parent.iterdir()] == ["out"]

    code, out, err = call(capsys, model, "--tasks", "none", "--perplexity", tmp_path / "held.txt", "--output", output)
    assert (code, out) == (2, "")
    assert err == f"error: --output: the folder '{output}' exists. Give another one, or --overwrite to replace it.\n"
    code, out, err = call(capsys, model, "--tasks", "none", "--perplexity", tmp_path / "held.txt", "--output", output,
                          "--overwrite")  # fmt: skip
    assert code == 0
    assert not (output / "results.csv").exists()
    again = json.loads((output / "results.json").read_text())["perplexity"]
    assert again["mean"]["loss"] == pytest.approx(found["perplexity"]["mean"]["loss"], rel=1e-6)


def test_json_is_all_there_is_on_standard_output(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--tasks", "variables", "--lengths", "1K", "--depths", 2, "--samples", 1]
    code, out, _ = call(capsys, model, *given, "--json", "--output", tmp_path / "out")
    assert code == 0
    assert out == (tmp_path / "out" / "results.json").read_text()
    # The same on disk, in small chunks: settings of streaming change no answer.
    code, again, err = call(capsys, model, *given, "--json", "--chunk-size", 64, "--device-budget", "200KiB",
                            "--offload-dir", tmp_path, "--dtype", "float32", "--device", "cpu")  # fmt: skip
    assert code == 0
    assert "disk " in err
    a, b = json.loads(out), json.loads(again)
    assert a["task_scores"] == b["task_scores"]
    for one, other in zip(a["answers"], b["answers"], strict=True):
        assert one["log_prob"] == pytest.approx(other["log_prob"], rel=1e-5)


def test_default_tasks_and_lengths_follow_the_model(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, model, "--samples", 1, "--depths", 1)
    assert code == 0
    assert "lengths: 4K (the model has 4,096 positions; --lengths sets others)" in err
    assert "tasks left out, since 4K, or 1 depths, are too few for them: variables" in err
    assert [task for task in TASKS.split(",") if f"\n  {task} " in out] == TASKS.split(",")[:-1]


@pytest.mark.parametrize(
    ("made_for", "said"),
    [(1000, "1,000"), (20_000, "4K, 8K, 16K"), (2**20, "4K, 8K, 16K, 32K, 64K, 128K"), (None, "4K, 8K, 16K, 32K")],
)
def test_default_lengths(made_for: int | None, said: str) -> None:
    class Model:
        class config:  # noqa: N801
            @staticmethod
            def get_text_config() -> Any:
                return type("Config", (), {} if made_for is None else {"max_position_embeddings": made_for})

    settings, _ = choose_settings(
        Model, make_byte_tokenizer(), tasks="needle", lengths=None, depths=3, samples=1, seed=0, threshold=0.85,
        haystack=None,
    )  # fmt: skip
    assert ", ".join(map(length_text, settings.lengths)) == said


def test_lengths_beyond_the_positions_of_the_model_are_noted(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, model, "--tasks", "needle", "--lengths", "5K", "--samples", 1)
    assert code == 0
    assert "note: up to 5,120 tokens are more than the 4,096 positions of this model" in err
    learned = save(tmp_path / "learned", "gpt2", n_positions=1024)
    code, out, err = call(capsys, learned, "--tasks", "needle", "--lengths", "2K")
    assert (code, out) == (2, "")
    assert "error: --lengths, --perplexity: 2,048 tokens cannot be evaluated." in err
    assert "1024 learned positions" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "4X"], "--lengths 4X: '4X' is not a number of tokens"),
        (["--lengths", "256"], "--lengths: 256 tokens are too short for task"),
        (
            ["--tasks", "needle", "--lengths", "256"],
            "--lengths: 256 tokens are too short for task 'needle', which takes",
        ),
        (["--tasks", "nedle"], "--tasks: there is no 'nedle'. Set some of: needle,"),
        (["--tasks", "none"], "--tasks none leaves nothing to do"),
        (["--tasks", "none", "--generated", "--perplexity", "x"], "--generated has no effect with --tasks none"),
        (["--threshold", "2"], "--threshold: 2.0 is out of range"),
        (["--overwrite"], "--overwrite has no effect without --output"),
        (["--perplexity", "nowhere"], "--perplexity: 'nowhere' does not exist"),
        (["--haystack", "nowhere"], "--haystack: 'nowhere' does not exist"),
        (["--chunk-size", "x"], "chunk_size='x': give a positive whole number of tokens, or 'auto'"),
        (["--dtype", "int8"], "dtype='int8': choose one of"),
    ],
)
def test_mistakes(model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = call(capsys, model, *arguments)
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith(f"error: {message}")


def test_counts_below_one_are_usage_errors(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--depths", "--samples"):
        code, out, err = call(capsys, model, option, 0)
        assert (code, out) == (2, "")
        assert f"Invalid value for '{option}'" in err


def test_a_file_without_text_is_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.txt").write_text("")
    code, _, err = call(capsys, model, "--tasks", "none", "--perplexity", tmp_path / "empty.txt")
    assert code == 2
    assert "--perplexity: the files hold no text" in err


def test_several_processes_are_refused(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    code, _, err = call(capsys, model)
    assert code == 2
    assert "trunkline evaluate is one process: start it without torchrun" in err


def test_a_folder_without_a_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, tmp_path)
    assert code == 2
    assert "is no model folder" in err


def test_the_bar_moves_by_tokens_and_within_a_sample() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    display = EvaluationDisplay(console, 4096 + 8192 + 100)
    with display:
        task = display.bar.tasks[0]
        display(EvaluateProgress(0, 3, "needle", 4096))
        assert task.completed == 0
        assert task.description.rstrip() == "1 of 3  needle 4K"
        display(EvaluateProgress(1, 3, "needle", 8192))
        assert task.completed == 4096
        for layer in range(2):
            for chunk in range(4):
                display.sweep(Progress("forward", layer, 2, chunk, 4))
        display.sweep(Progress("head", -1, 2, 0, 4))
        assert task.completed == 4096 + 8192
        display.sweep(Progress("forward", 0, 2, 0, 1))  # what is generated after the sequence has been read
        assert task.completed == 4096 + 8192
        display(EvaluateProgress(2, 3, "a/very/long/name/of/a/document.txt", 100))
        assert task.description == "3 of 3  a/very/long/name/of/a/d…"
        display(EvaluateProgress(3, 3, "", 0))
        assert task.completed == display.done_tokens == 4096 + 8192 + 100
