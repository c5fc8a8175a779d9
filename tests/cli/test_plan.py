"""`trunkline plan`: a table, JSON, a recipe; and what it says where nothing fits, or nothing can be said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from trunkline.cli import app as cli
from trunkline.report.run_folder import PlannedStep
from trunkline.report.timeline import Timeline
from trunkline.train.load_recipe import load_recipe
from trunkline.utils.json_records import read_json

RECIPE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
LAYERS = 4
SMALL = f"{{head_dim: 16, hidden_size: 64, intermediate_size: 96, num_hidden_layers: {LAYERS}}}"


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The quick start's, small, with what a plan may choose left open."""
    content = yaml.safe_load(RECIPE.read_text())
    for name in ("keep", "chunk_size"):
        del content[name]
    content |= {"context": 8192, "data": {"files": ["."], "tokenizer": "bytes"}}
    content["model"]["overrides"] |= {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS}
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def plan(capsys: pytest.CaptureFixture[str], recipe: Path, *arguments: object) -> tuple[int, str, str]:
    code = cli.run(["plan", str(recipe), *(str(argument) for argument in arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_quick_start_on_a_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    overrides = ["--context", "4096", "--chunk_size", "2048", "--model.overrides", SMALL]
    code, out, err = plan(capsys, RECIPE, "--hardware", "a100-80g", *overrides)
    assert code == 0
    assert err.startswith("simulated chunk_size 2,048, keep [attention]: ")  # in a log a search is not silent
    lines = out.splitlines()
    assert lines[0].startswith("tiny-llama (115.39K parameters, vocabulary 258) on 1 x NVIDIA A100")
    assert lines[1] == "fits: 4,096 tokens x 1"
    assert "a step" in lines[2]
    assert "MFU" in lines[2]
    assert "chunk_size 2,048, keep [attention]" in out
    assert "cost: 45,056 tokens take 0.0 device hours" in out  # 11 steps
    assert all(len(line) <= 100 for line in lines)
    assert next(line for line in lines if line.startswith("device")).split()[3:5] == ["74.3", "GiB"]


def test_json_is_what_a_report_reads(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    code, out, _ = plan(capsys, recipe, "--hardware", "h100-sxm", "--gpus", 2, "--json", "--tokens", 10**9)
    assert code == 0
    record = json.loads(out)
    assert record["fits"] is True
    assert record["context"] == 8192
    assert record["ranks"] == {"dp": 1, "sp": 2, "cp": 1, "tp": 1, "zero": 2, "offload": False}
    assert set(record["streaming"]) == {"chunk_size", "keep", "checkpoint_every"}
    assert set(record["memory"]) == {"device_budget"}  # nothing is offloaded
    assert record["gpu_hours"] == pytest.approx(1e9 / record["tokens_per_second"] * 2 / 3600)
    assert record["peaks"] == {tier: sum(parts.values()) for tier, parts in record["holders"].items()}
    assert 0 < record["mfu"] < record["mfu_recompute_counted"] < 1
    read = read_json(PlannedStep, out)
    assert (read.seconds, read.tokens_per_second) == (record["seconds"], record["tokens_per_second"])
    assert (read.peaks, read.moved) == (record["peaks"], record["moved"])
    assert read.moved["comm"] > 0


def test_settings_of_the_recipe_are_not_changed_by_the_plan(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    given = ["--keep", "[]", "--checkpoint_every", 2, "--device_budget", "100MiB", "--chunk_size", 4096]
    code, out, _ = plan(capsys, recipe, "--hardware", "a100-80g", "--json", *given)
    record = json.loads(out)
    assert code == 0
    assert {**record["streaming"], **record["memory"]} == {
        "chunk_size": 4096, "keep": [], "checkpoint_every": 2, "device_budget": 100 * 2**20,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "a100"], "hardware='a100': no such profile; there are"),
        (["--hardware", "a100-80g", "--gpus", "0"], "gpus=0: give a positive whole number of devices"),
        (["--hardware", "a100-80g", "--host-memory", "0"], "give the memory of a node, such as '1TiB'"),
        (["--hardware", "a100-80g", "--host-memory", "lots"], "host_memory='lots'"),
        (["--hardware", "a100-80g", "--contxt", "8"], "'contxt' is not a setting"),
    ],
)
def test_mistakes(capsys: pytest.CaptureFixture[str], recipe: Path, arguments: list[str], message: str) -> None:
    code, out, err = plan(capsys, recipe, *arguments)
    assert (code, out) == (2, "")
    assert message in " ".join(err.split())
    assert "Traceback" not in err


def test_a_model_that_does_not_fit_exits_with_1(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    """Its parameters alone are too many, at one token a chunk, too; no weights are made to find that out."""
    big = ["--model.preset", "llama-3-70b", "--model.overrides", "{}", "--model.dtype", "bfloat16"]
    arguments = [*big, "--context", 64, "--chunk_size", 1, "--hardware", "rtx-4090", "--host-memory", "64GiB"]
    code, out, err = plan(capsys, recipe, *arguments)
    assert code == 1
    said = " ".join((out + err).split())
    assert "does not fit: host memory has 57.6 GiB for each device, and parameters and optimizer take all of it" in said
    assert not torch.cuda.is_initialized()


def test_the_step_folder_is_read_by_report(capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "step"
    given = [recipe, "--hardware", "a100-80g", "--chunk_size", 1024, "--step", folder]
    assert plan(capsys, *given)[0] == 0
    step, before = (Timeline.from_json((folder / f"{name}.json").read_text()) for name in ("timeline", "before"))
    assert read_json(PlannedStep, (folder / "plan.json").read_text()).seconds == pytest.approx(step.seconds)
    assert before.peak("device") > step.peak("device")  # type: ignore[operator]
    code, _, err = plan(capsys, *given)
    assert code == 2
    assert "exists: give another folder" in err


def test_write_saves_a_recipe_with_the_plans_settings(
    capsys: pytest.CaptureFixture[str], recipe: Path, tmp_path: Path
) -> None:
    """It is read back as it was planned; a file that is there is not written over."""
    target = tmp_path / "planned.yaml"
    given = ["--hardware", "a100-80g", "--gpus", 2, "--model.dtype", "bfloat16"]
    code, out, _ = plan(capsys, recipe, *given, "--json", "--write", target)
    record = json.loads(out)
    settings = {**record["streaming"], **record["memory"]}
    assert code == 0
    written = load_recipe(target)
    assert written.context == 8192
    assert {name: written.stream_settings[name] for name in settings} == {**settings, "keep": ("attention",)}
    assert (written.ranks.sp, written.ranks.zero) == (2, 2)
    before = target.read_bytes()
    code, _, err = plan(capsys, recipe, *given, "--write", target)
    assert (code, target.read_bytes()) == (2, before)
    assert "exists: give another file" in err


def test_a_context_that_is_too_long(capsys: pytest.CaptureFixture[str], recipe: Path) -> None:
    """The shortfall and its fix are printed, also as JSON."""
    long = [recipe, "--context", 2**26, "--chunk_size", 2**20, "--hardware", "rtx-4090", "--host-memory", "1GiB"]
    code, out, _ = plan(capsys, *long)
    assert code == 1
    assert out.startswith("does not fit: ")
    assert "raise device_budget or host_budget by" in out
    code, out, _ = plan(capsys, *long, "--json")
    assert code == 1
    assert json.loads(out)["fits"] is False
