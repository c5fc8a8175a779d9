"""Evaluation between steps: results, files, and losses of training that do not change."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

import trunkline
from trunkline.cli.train import summary
from trunkline.data import cut_documents, find_files, load_encoder, read_documents
from trunkline.evaluate import EvaluateProgress
from trunkline.train import evaluating
from trunkline.train.build_model import build_config, build_model
from trunkline.train.display import Display, LiveDisplay, RunHeader
from trunkline.train.evaluating import EvaluationRecord, Evaluator, evaluation_text
from trunkline.train.load_recipe import RecipeError, load_recipe
from trunkline.train.optimizer import Optimizer
from trunkline.train.output_folder import json_line
from trunkline.train.part_timer import PartTimer
from trunkline.train.recipe import EvaluateSection, Recipe
from trunkline.train.run_training import TrainResult, train
from trunkline.train.trainer import Trainer, progress_hook
from trunkline.train.world import World

SMALL = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 16}
CPU = torch.device("cpu")
CONTEXT = 700  # of bytes: a needle takes 630 with five depths


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    for folder, count in (("corpus", 2), ("held", 2)):
        (tmp_path / folder).mkdir()
        for number in range(count):
            text = "".join(f"{folder} {number} is {i * i} of {i}\n" for i in range(70))
            (tmp_path / folder / f"{number}.txt").write_text(text)
    return tmp_path


def make(texts: Path, name: str = "run", **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "model": {"preset": "tiny-llama", "dtype": "float32", "overrides": SMALL},
            "data": {"files": [str(texts / "corpus")]}, "context": CONTEXT, "chunk_size": 128, "steps": 5,
            "optimizer": {"lr": 1e-2}, "output": str(texts / name), "preflight": False, **more,
        }
    )  # fmt: skip


def section(texts: Path, **more: Any) -> dict[str, Any]:
    return {"every": 2, "files": [str(texts / "held")], "depths": 5, "samples": 1, **more}


def run(recipe: Recipe) -> tuple[TrainResult, str]:
    text = io.StringIO()
    return train(recipe, Display(Console(file=text, width=200))), text.getvalue()


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("generated", [False, True])
def test_evaluation_does_not_change_losses_by_a_bit(texts: Path, generated: bool) -> None:
    # Dropout of the residual stream draws in every step; a draw too many would show in the next loss.
    model = {"preset": "gpt-1.2b", "dtype": "float32",
             "overrides": {"n_layer": 2, "n_embd": 32, "n_head": 2, "resid_pdrop": 0.1}}  # fmt: skip
    plain, _ = run(make(texts, "plain", model=model))
    # With one question, what may be generated behind it goes beyond the learned table.
    more = {"generated": True, "depths": 1} if generated else {}
    other, _ = run(make(texts, "other", model=model, evaluate=section(texts, **more)))
    assert [step.loss for step in other.steps] == [step.loss for step in plain.steps]
    assert [step.grad_norm for step in other.steps] == [step.grad_norm for step in plain.steps]
    assert len(other.evaluations) == 3
    assert plain.evaluations == []
    a, b = weights(plain), weights(other)
    assert all(a[name].equal(b[name]) for name in a)


def weights(result: TrainResult) -> dict[str, torch.Tensor]:
    return load_file(result.output / "model" / "model.safetensors")


def test_files_and_lines_of_evaluations(texts: Path) -> None:
    recipe = make(texts, evaluate=section(texts, lengths=[650, 700]))
    result, said = run(recipe)
    found = lines(result.output / "evaluations.jsonl")
    assert [line["step"] for line in found] == [2, 4, 5]
    assert set(found[0]) == {"step", "seconds", "loss", "perplexity", "loss_tokens", "scores", "effective_length"}
    assert found == [json.loads(json_line(record)) for record in result.evaluations]
    assert found[-1]["loss"] < found[0]["loss"]
    assert found[0]["scores"]["forced"]["needle"].keys() == {"650", "700"}
    whole = json.loads((result.output / "evaluation" / "results.json").read_text())
    assert whole["perplexity"]["mean"]["loss"] == found[-1]["loss"]
    assert len(whole["answers"]) == 2 * 5
    names = {path.name for path in (result.output / "evaluation").iterdir()}
    assert {"table.txt", "results.csv", "heatmap-forced.png", "perplexity.png", "perplexity.csv"} <= names
    told = [line for line in said.splitlines() if line.startswith("eval ")]
    assert len(told) == 3
    assert told[0].startswith(
        f"eval 2/5  loss {found[0]['loss']:.4f}  perplexity {found[0]['perplexity']:,.3f}  needle"
    )
    assert load_recipe(result.output / "recipe.yaml") == recipe
    closing = "\n".join(summary(recipe, result))
    assert " of evaluations: loss " in closing
    assert "  evaluations.jsonl  3 lines" in closing
    assert "  evaluation/    tables and pictures of the last one" in closing
    # All tokens of the held-out files but the first of each piece.
    ids = [len(load_encoder("bytes").encode(d.text)) for d in read_documents(find_files([str(texts / "held")]))]
    assert found[0]["loss_tokens"] == sum(count - -(-count // CONTEXT) for count in ids)


def trainer_for(recipe: Recipe) -> Trainer:
    encoder = load_encoder("bytes")
    samples = cut_documents(read_documents(find_files(recipe.data.files)), encoder, context=recipe.context)
    model = build_model(recipe, build_config(recipe, encoder), CPU)
    clock = PartTimer(CPU)
    display = Display(Console(file=io.StringIO()))
    trunkline.stream(model, **recipe.stream_settings, progress=progress_hook(clock, display))
    return Trainer(recipe, model, samples, Optimizer(model, recipe.optimizer), clock, display, CPU, None, World())


def evaluator_for(recipe: Recipe, notes: list[str] | None = None) -> Evaluator:
    tell = (notes if notes is not None else []).append
    return Evaluator(recipe, load_encoder("bytes"), find_files(recipe.data.files), tell)


def test_loss_is_the_training_loss_of_the_same_tokens(texts: Path) -> None:
    for number in range(2):  # whole samples, so that training drops nothing of them
        path = texts / "corpus" / f"{number}.txt"
        path.write_text(path.read_text()[: 2 * CONTEXT - 1])
    recipe = make(texts, batch_size=2, gradient_accumulation=2, steps=1,
                  evaluate=section(texts, files=[str(texts / "corpus")], tasks=[]))  # fmt: skip
    trainer, notes = trainer_for(recipe), []
    assert len(trainer.samples) == 4
    record, found = evaluator_for(recipe, notes).run(trainer.model, 0, trainer.clock)
    assert record.loss == pytest.approx(trainer.step(0).loss, rel=1e-6)
    assert record.loss_tokens == 4 * (CONTEXT - 1)
    assert len(found.by_document) == 4
    assert len(notes) == 1
    assert "2 of 2 are in data.files, too" in notes[0]


def test_the_next_step_does_not_count_the_evaluation(texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budgets = {"device_budget": "150KiB", "offload_dir": str(texts), "disk_budget": "64MiB"}
    recipe = make(texts, evaluate=section(texts, tasks=[]), **budgets, chunk_size=32)
    trainer, evaluator = trainer_for(recipe), evaluator_for(recipe)
    trainer.step(0)
    expected = trainer.step(1)
    moved: list[int] = []

    def stats(model: Any) -> trunkline.Stats:
        found = trunkline.stats(model)
        moved.append(int(found.lanes["fetch"].moved))
        return found

    monkeypatch.setattr(evaluating, "stats", stats)
    now = PartTimer.now
    monkeypatch.setattr(PartTimer, "now", lambda self: now(self) + shift[0])
    shift = [0.0]
    record, _ = evaluator.run(trainer.model, 2, trainer.clock, lambda _: shift.__setitem__(0, shift[0] + 1000.0))
    assert moved[0] > 0
    metrics = trainer.step(2)
    assert metrics.total_seconds < 500
    assert metrics.bytes_moved == expected.bytes_moved
    assert 0 < record.seconds < 500


def test_evaluations_are_due_regularly_and_after_the_last_step(texts: Path) -> None:
    evaluator = evaluator_for(make(texts, steps=7, evaluate=section(texts, every=3)))
    assert [step for step in range(1, 8) if evaluator.is_due(step)] == [3, 6, 7]
    info = RunHeader([], 7, 1, 1, 0.5, evaluate_every=3)
    assert [info.evaluations_after(step) for step in range(8)] == [3, 3, 3, 2, 2, 2, 1, 0]
    assert RunHeader([], 7, 1, 1, 0.5).evaluations_after(0) == 0


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"lengths": [100]},
            r"evaluate\.lengths: 100 tokens are too short for task 'needle', which takes at least \d+",
        ),
        ({"files": ["nowhere"]}, r"evaluate\.files: 'nowhere' does not exist"),
        ({"haystack": ["nowhere"]}, r"evaluate\.haystack: 'nowhere' does not exist"),
    ],
)
def test_mistakes_are_refused_before_the_first_step(texts: Path, more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        run(make(texts, evaluate=section(texts, **more)))
    assert not list(texts.glob("run*"))


def test_lengths_beyond_positions_are_refused_and_beyond_context_noted(texts: Path) -> None:
    gpt = {"preset": "gpt-1.2b", "dtype": "float32", "overrides": {"n_layer": 1, "n_embd": 32, "n_head": 2}}
    with pytest.raises(RecipeError, match=r"evaluate\.lengths: .*700 learned positions and was given 701 .*or less"):
        run(make(texts, model=gpt, evaluate=section(texts, lengths=[701])))
    notes: list[str] = []
    evaluator_for(make(texts, evaluate=section(texts, lengths=[1400])), notes)
    assert notes == ["note: evaluate.lengths: 1,400 is longer than context; its memory is not estimated"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"files": ["a"]}, r"evaluate\.files has no effect without evaluate\.every"),
        ({"every": 1, "tasks": []}, r"nothing to evaluate: set evaluate\.files or evaluate\.tasks"),
        ({"every": 1, "tasks": ["nedle"]}, r"evaluate\.tasks: there is no 'nedle'\. Set some of: needle"),
        ({"every": 1, "lengths": "4X"}, r"evaluate\.lengths: '4X' is not a number of tokens"),
        ({"every": 0}, r"evaluate\.every: .*greater than or equal to 1"),
        ({"every": 1, "threshold": 0}, r"evaluate\.threshold: 0\.0 is out of range"),
    ],
)
def test_invalid_settings_are_refused(tmp_path: Path, given: dict[str, Any], message: str) -> None:
    path = tmp_path / "recipe.yaml"
    base = {"model": {"preset": "tiny-llama"}, "data": {"files": ["stdlib"]}, "context": 64, "steps": 1, "output": "x"}
    path.write_text(json.dumps({**base, "evaluate": given}))
    with pytest.raises(RecipeError, match=message):
        load_recipe(path)


def test_lists_may_be_text_with_commas(texts: Path) -> None:
    given = {"every": 1, "lengths": "4K, 1M", "tasks": "needle,passkey", "files": "a.txt"}
    recipe = make(texts, evaluate=given)
    assert recipe.evaluate.lengths == (4096, 2**20)
    assert recipe.evaluate.tasks == ("needle", "passkey")
    assert recipe.evaluate.files == ["a.txt"]
    assert make(texts, evaluate={"every": 1, "lengths": 4096}).evaluate.lengths == (4096,)
    assert make(texts, evaluate={"every": 1}).evaluate_settings.lengths == (CONTEXT,)
    assert make(texts).evaluate.every is None


def record(**more: Any) -> EvaluationRecord:
    given = {"step": 2, "seconds": 3.0, "loss": 2.0, "perplexity": 7.389, "loss_tokens": 10,
             "scores": {"forced": {"needle": {4096: 1.0, 8192: 0.5}}, "generated": {"needle": {4096: 0.0}}},
             "effective_length": {"forced": 4096, "generated": None}}  # fmt: skip
    return EvaluationRecord(**{**given, **more})


def test_null_turns_evaluation_off() -> None:
    """Also where a recipe has everything else about it: on the command line, say."""
    section = EvaluateSection.model_validate({"every": None, "files": ["a.txt"], "tasks": ["needle"]})
    assert section.every is None


def test_evaluation_as_one_line() -> None:
    assert evaluation_text(record()) == (
        "loss 2.0000  perplexity 7.389  needle 75.0%  effective 4K  generated: needle 0.0%"
    )
    below = record(loss=None, perplexity=None, effective_length={"forced": None, "generated": None})
    assert evaluation_text(below) == "needle 75.0%  effective below 4K  generated: needle 0.0%"


def rendered(display: LiveDisplay) -> str:
    console = Console(file=io.StringIO(), width=110)
    console.print(display._render())
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_live_display_shows_evaluations() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=110, color_system=None)
    display = LiveDisplay(console)
    display.begin(RunHeader([], 5, 1, 1, 0.5, evaluate_every=2))
    try:
        display.evaluating(EvaluateProgress(3, 10, "needle", 16384))
        display.progress(trunkline.Progress("forward", 1, 4, 2, 8))
        during = rendered(display)
        display.evaluated(record())
        after = rendered(display)
    finally:
        display.end()
    assert "needle 16K  4 of 10" in during
    assert "sweep" not in during
    assert "sweep" in after
    assert display._step_progress.fraction == 0.0  # an evaluation's sweep is not the step's
    assert "needle 75.0%  effective 4K" in after
    assert "after step 2" in after
