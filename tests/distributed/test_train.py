"""`trunkline train` over several processes: the same run as in one, and one message for a mistake."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from distributed.processes import outcomes, run, start
from trunkline.cli import app
from trunkline.train import world
from trunkline.train.load_recipe import RecipeError, load_recipe
from trunkline.train.recipe import Recipe


def recipe(folder: Path, **changes: Any) -> Path:
    corpus = folder / "corpus"
    corpus.mkdir(exist_ok=True)
    for number in range(4):
        text = " ".join(str((number + 3) * n * n % 997) for n in range(400))
        (corpus / f"{number}.txt").write_text(text)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "num_attention_heads": 4,
             "num_key_value_heads": 2}  # fmt: skip
    content = {
        "model": {"preset": "tiny-llama", "dtype": "float32", "overrides": sizes}, "data": {"files": [str(corpus)]},
        "context": 96, "chunk_size": 32, "batch_size": 2, "gradient_accumulation": 2, "steps": 3, "device": "cpu",
        "optimizer": {"lr": 0.003}, "output": str(folder / "out"), "overwrite": True, **changes,
    }  # fmt: skip
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def command(path: str, log: str) -> int:
    """Run `trunkline train` with its output in files."""
    streams = {1: sys.stdout, 2: sys.stderr}
    saved = {number: os.dup(number) for number in streams}
    for number, stream in streams.items():
        stream.flush()
        os.dup2(os.open(f"{log}-{os.environ['RANK']}-{number}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    try:
        return app.run(["train", path])
    finally:
        for number, stream in streams.items():
            stream.flush()
            os.dup2(saved[number], number)


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("alone")
    assert app.run(["train", str(recipe(folder))]) == 0
    return metrics(folder), AutoModelForCausalLM.from_pretrained(folder / "out" / "model").state_dict()


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param({"sp": 2}, id="sp", marks=pytest.mark.soak),
        pytest.param({"dp": 2}, id="dp"),
        pytest.param({"cp": 2, "zero": 2}, id="cp", marks=pytest.mark.soak),
        pytest.param({"tp": 2, "zero": 0}, id="tp", marks=pytest.mark.soak),
        pytest.param({"sp": 2, "offload": True}, id="offload"),
    ],
)
def test_run_over_processes_equals_a_run_of_one(ranks: dict[str, Any], alone: Any, tmp_path: Path) -> None:
    path = recipe(tmp_path, ranks=ranks)
    assert run(2, command, str(path), str(tmp_path / "log")) == [0, 0]
    expected, weights = alone
    got = metrics(tmp_path)
    assert [step["loss"] for step in got] == pytest.approx([step["loss"] for step in expected], rel=1e-5)
    assert [step["grad_norm"] for step in got] == pytest.approx([step["grad_norm"] for step in expected], rel=1e-4)
    assert [step["lr"] for step in got] == [step["lr"] for step in expected]
    assert [step["tokens"] for step in got] == [step["tokens"] for step in expected]
    if "dp" not in ranks and "tp" not in ranks:
        assert all(step["lanes"]["comm"]["bytes"] > 0 for step in got)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    for name, weight in model.state_dict().items():
        # AdamW turns the sign of a gradient that is zero but for rounding into a whole step.
        assert float((weight - weights[name]).abs().max()) <= 2 * 3 * 0.003
        assert float((weight - weights[name]).norm()) <= 1e-3 * float(weights[name].norm()), name
    assert "step 3/3" in (tmp_path / "out" / "logs" / "rank-1.log").read_text()
    assert "step 3/3" in (tmp_path / "log-0-1").read_text()
    assert (tmp_path / "log-1-1").read_text() == ""
    assert "torchrun --nproc-per-node 2 -m trunkline train" in (tmp_path / "log-0-1").read_text()


def test_bfloat16_shards_are_float32_masters(tmp_path: Path) -> None:
    path = recipe(tmp_path, model={"preset": "tiny-llama", "dtype": "bfloat16"}, ranks={"dp": 2})
    assert run(2, command, str(path), str(tmp_path / "log")) == [0, 0]
    assert metrics(tmp_path)[-1]["loss"] < metrics(tmp_path)[0]["loss"]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")
    assert model.dtype == torch.bfloat16
    assert model.config.architectures == ["LlamaForCausalLM"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"ranks": {"sp": 3}}, "sp x cp x tp must divide 2: 3 does not"),
        ({"ranks": {"dp": 2}, "batch_size": 3}, "batch_size (3, global) is not a multiple of ranks.dp (2)"),
        ({"ranks": {"sp": 2}, "model": {"preset": "tiny-llama", "overrides": {"num_attention_heads": 3,
          "num_key_value_heads": 1, "hidden_size": 24}}}, "sp=2 does not divide 3 query"),
        ({"ranks": {"sp": 2}, "device": "cuda:1"}, "names one device, and there are 2 processes"),
        ({"ranks": {"spp": 2}}, "Did you mean 'ranks.sp'?"),
    ],
)  # fmt: skip
def test_mistake_is_reported_by_one_rank(changes: dict[str, Any], says: str, tmp_path: Path) -> None:
    path = recipe(tmp_path, **changes)
    assert run(2, command, str(path), str(tmp_path / "log")) == [2, 2]
    told = [(tmp_path / f"log-{rank}-2").read_text() for rank in range(2)]
    assert sum(says in text for text in told) == 1, told
    assert not any("Traceback" in text for text in told)
    assert not (tmp_path / "out").exists()


def test_one_process_is_refused_with_the_torchrun_command(tmp_path: Path) -> None:
    settings = yaml.safe_load(recipe(tmp_path, ranks={"sp": 2}).read_text())
    with pytest.raises(RecipeError, match="torchrun --nproc-per-node 2 -m trunkline train"):
        world.join(Recipe.model_validate(settings))


def timeouts(seconds: float) -> list[float]:
    import trunkline
    from trunkline.distributed.mesh import parallel_dims_of

    mesh = trunkline.init_mesh(sp=2)
    world.World(mesh, parallel_dims_of(mesh)).expect_step_seconds(seconds)
    device = torch.device("cpu")
    groups = world._groups(mesh)
    return [group._get_backend(device).options._timeout.total_seconds() for group in groups]


def test_timeouts_follow_the_duration_of_a_step() -> None:
    for seconds, expected in ((0.1, 180), (60, 1200), (3600, 72_000)):
        assert set(run(2, timeouts, seconds)[0]) == {expected}


def test_killed_process_ends_the_run_with_a_message(tmp_path: Path) -> None:
    """The remaining rank gets SIGTERM, as torchrun sends it."""
    path = recipe(tmp_path, ranks={"sp": 2}, steps=10_000)
    started = start(2, command, str(path), str(tmp_path / "log"))
    deadline = time.monotonic() + 60
    while "step    10/10000" not in (
        Path(f"{tmp_path}/log-0-1").read_text() if (tmp_path / "log-0-1").exists() else ""
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    begun = time.monotonic()
    started.processes[1].kill()
    time.sleep(0.2)
    started.processes[0].terminate()
    found = outcomes(started)
    assert time.monotonic() - begun < 30
    assert found == [(True, 1), (False, None)]
    told = (tmp_path / "log-0-2").read_text()
    assert "error: " in told
    assert "another" in told
    assert "The metrics of the" in told
    assert "Traceback" not in told
    assert len(list(tmp_path.glob("out.partial-*"))) == 1


@pytest.mark.parametrize(
    "example", sorted((Path(__file__).parents[2] / "examples").glob("*.yaml")), ids=lambda p: p.name
)
def test_examples_are_recipes(example: Path) -> None:
    load_recipe(example)


def test_example_of_two_processes_runs(tmp_path: Path) -> None:
    example = yaml.safe_load((Path(__file__).parents[2] / "examples" / "two-processes.yaml").read_text())
    small = {"context": 256, "chunk_size": 64, "steps": 1, "device": "cpu"}
    settings = {key: value for key, value in example.items() if key not in ("output", "data")} | small
    assert run(2, command, str(recipe(tmp_path, **settings)), str(tmp_path / "log")) == [0, 0]
