"""Evaluation over two ranks: the same results as one process, also during training, which it leaves unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import build
from safetensors.torch import load_file

import trunkline
from distributed.processes import run
from distributed.test_train import command, metrics, recipe
from trunkline.cli import app
from trunkline.data.tokenizers import make_byte_tokenizer
from trunkline.evaluate import EvaluateSettings, Evaluation, StreamedContinuer, StreamedScorer, evaluate, even_depths


def found(parallel_dims: dict[str, int] | None, zero: int | None = None) -> tuple[list[Any], list[Any]]:
    """Return log probabilities of answers, and generated texts."""
    model = build("llama", torch.float64, vocab_size=258, max_position_embeddings=2048, num_hidden_layers=2)
    mesh = None if parallel_dims is None else trunkline.init_mesh(**parallel_dims)
    if zero is not None:
        trunkline.shard(model, mesh, zero=zero)
    trunkline.stream(model, mesh=mesh, chunk_size=128)
    settings = EvaluateSettings((700,), ("needle",), even_depths(4), samples=2, batch_size=2)
    state = torch.get_rng_state()
    result: Evaluation = evaluate(StreamedScorer(model), make_byte_tokenizer(), settings,
                                  continuer=StreamedContinuer(model, stop=()))  # fmt: skip
    assert torch.get_rng_state().equal(state)
    assert model.training
    outcomes = result.outcomes
    return [o.log_prob for o in outcomes if o.way == "forced"], [o.text for o in outcomes if o.way == "generated"]


@pytest.mark.parametrize(
    ("parallel_dims", "zero"),
    [
        ({"sp": 2}, 3),
        pytest.param({"dp": 2}, 3, marks=pytest.mark.soak),
        pytest.param({"cp": 2}, 2, marks=pytest.mark.soak),
        pytest.param({"sp": 2}, None, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_evaluation_gives_the_results_of_one_process(parallel_dims: dict[str, int], zero: int | None) -> None:
    log_probs, texts = found(None)
    assert len(log_probs) == len(texts) == 8
    first, second = run(2, found, parallel_dims, zero)
    assert first == second
    # Scores are fp32, of answers of seven tokens whose logarithms are below 16 each.
    assert first[0] == pytest.approx(log_probs, rel=1e-5)
    assert first[1] == texts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("alone")
    assert app.run(["train", str(recipe(folder, **asked(folder)))]) == 0
    return evaluations(folder)


def asked(folder: Path) -> dict[str, Any]:
    evaluation = {"every": 2, "files": [str(folder / "held.txt")], "lengths": 640, "depths": 3, "samples": 1,
                  "generated": True}  # fmt: skip
    (folder / "held.txt").write_text(" ".join(str(n * n % 89) for n in range(130)))
    return {"evaluate": evaluation}


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "evaluations.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"sp": 2}, id="sp", marks=pytest.mark.soak),
        pytest.param({"dp": 2}, id="dp", marks=pytest.mark.soak),
        pytest.param({"cp": 2, "zero": 2}, id="cp", marks=pytest.mark.soak),
        pytest.param({"tp": 2, "zero": 0}, id="tp", marks=pytest.mark.soak),
    ],
)
def test_evaluation_during_training_leaves_it_unchanged(
    ranks: dict[str, Any], alone: list[dict[str, Any]], tmp_path: Path
) -> None:
    got = {}
    for name, more in (("plain", {}), ("evaluated", asked(tmp_path))):
        folder = tmp_path / name
        folder.mkdir()
        path = recipe(folder, ranks=ranks, **more)
        assert run(2, command, str(path), str(folder / "log")) == [0, 0], (folder / "log-0-2").read_text()
        got[name] = metrics(folder), load_file(folder / "out" / "model" / "model.safetensors")
    assert [step["loss"] for step in got["plain"][0]] == [step["loss"] for step in got["evaluated"][0]]
    assert all(weight.equal(got["plain"][1][name]) for name, weight in got["evaluated"][1].items())
    lines = evaluations(tmp_path / "evaluated")
    assert [line["step"] for line in lines] == [2, 3]
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in alone], rel=1e-4)
    assert [line["loss_tokens"] for line in lines] == [line["loss_tokens"] for line in alone]
    out = tmp_path / "evaluated" / "out"
    assert "eval 3/3" in (out / "logs" / "rank-1.log").read_text()
    assert (out / "evaluation" / "heatmap-generated.png").exists()
