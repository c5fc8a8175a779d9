"""A run that cannot fit stops before its first step, and chunks of `auto` are chosen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from distributed.processes import run
from plan.profiles import constant

from trunkline.data import load_encoder
from trunkline.plan.estimate import Estimate
from trunkline.train import preflight as module
from trunkline.train.build_model import build_config, tokenizer_spec
from trunkline.train.display import Display
from trunkline.train.load_recipe import RecipeError, dump_recipe, load_recipe
from trunkline.train.preflight import PreflightResult, preflight
from trunkline.train.recipe import Recipe
from trunkline.train.run_training import train
from trunkline.train.world import World

CPU = torch.device("cpu")
MIB = 2**20


def recipe_of(folder: Path, **changed: Any) -> Recipe:
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 200)
    given = {
        "model": {"preset": "tiny-llama", "dtype": "float32"}, "data": {"files": [str(folder / "text.txt")]},
        "context": 2_048, "chunk_size": 512, "steps": 1, "output": str(folder / "run"),
    }  # fmt: skip
    return Recipe.model_validate(given | changed)


def preflight_of(recipe: Recipe) -> PreflightResult:
    return preflight(recipe, build_config(recipe, load_encoder(tokenizer_spec(recipe))), World(), CPU)


def with_room(monkeypatch: pytest.MonkeyPatch, **free: int) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda *_: {"device": 2**40, **free})


@pytest.fixture(autouse=True)
def _no_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "profile_of", lambda _: None)


def test_a_run_that_does_not_fit_stops_and_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, device=8 * MIB)
    recipe = recipe_of(tmp_path)
    with pytest.raises(RecipeError, match=r"would hold [\d.]+ MiB in its device tier \(.*optimizer.*7\.7 MiB is free"):
        train(recipe, Display())
    assert not (tmp_path / "run").exists()
    assert not list(tmp_path.glob("run.partial*"))


def test_fit_is_exact_to_the_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as much as it says that a step takes it goes on, with one byte less it stops."""
    recipe = recipe_of(tmp_path)
    with_room(monkeypatch)
    estimated = preflight_of(recipe).estimate
    assert estimated is not None
    wanted = sum(estimated.memory["device"].values())
    monkeypatch.setattr(module, "_USABLE", 1.0)
    with_room(monkeypatch, device=wanted)
    preflight_of(recipe)
    with_room(monkeypatch, device=wanted - 1)
    with pytest.raises(RecipeError, match="does not fit"):
        preflight_of(recipe)


def test_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, disk=1 * MIB)
    with pytest.raises(RecipeError, match=r"disk tier.*another disk"):
        preflight_of(recipe_of(tmp_path, device_budget="4MiB", offload_dir=str(tmp_path)))


def test_small_budgets_are_refused_by_the_placement(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="device_budget"):
        preflight_of(recipe_of(tmp_path, device_budget="10KiB"))


def test_auto_takes_the_largest_chunks_that_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, context=8_192, chunk_size="auto")
    with_room(monkeypatch)
    assert preflight_of(recipe).recipe.chunk_size == 4_096
    needs = {}
    for chunk in (4_096, 2_048, 1_024):
        estimated = preflight_of(recipe.model_copy(update={"chunk_size": chunk})).estimate
        assert estimated is not None
        needs[chunk] = sum(estimated.memory["device"].values())
    assert needs[4_096] > needs[2_048] > needs[1_024]
    with_room(monkeypatch, device=int(needs[1_024] / 0.96) + 1_000)
    assert preflight_of(recipe).recipe.chunk_size == 1_024


def test_auto_takes_the_faster_of_two_sizes_where_speeds_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator that costs the host a lot makes larger chunks the faster ones."""
    recipe = recipe_of(tmp_path, context=16_384, chunk_size="auto")
    monkeypatch.setattr(module, "profile_of", lambda _: constant("cpu", host_seconds=0.01))
    with_room(monkeypatch)
    found = preflight_of(recipe)
    assert found.recipe.chunk_size == 8_192
    assert found.estimate is not None
    assert found.estimate.step is not None
    record = json.loads(found.plan_json() or "")
    assert record["seconds"] == found.estimate.step.seconds


def test_each_estimated_chunk_size_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, context=2**20, chunk_size="auto")
    seen: list[str] = []
    monkeypatch.setattr(module, "_step", lambda *args: Estimate({}, {}, {"device": {"all": 2**41}, "host": {}}))
    with_room(monkeypatch)
    with pytest.raises(RecipeError, match="does not fit"):
        preflight(recipe, build_config(recipe, load_encoder(tokenizer_spec(recipe))), World(), CPU, seen.append)
    assert seen == [f"estimating a step in chunks of {size}" for size in ("4,096", "2,048")]  # 512 chunks at most


def test_memory_is_estimated_before_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, context=16_384, chunk_size="auto")
    machines: list[object] = []

    def step(*args: object) -> Estimate:
        machines.append(args[4])
        return Estimate({}, {}, {"device": {"all": 2**41}, "host": {}})

    monkeypatch.setattr(module, "_step", step)
    monkeypatch.setattr(module, "profile_of", lambda _: constant("cpu"))
    with_room(monkeypatch)
    with pytest.raises(RecipeError, match="does not fit"):
        preflight_of(recipe)
    assert set(machines) == {None}


def test_model_that_cannot_be_loaded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each process of a job that cuts parameters builds all of them first."""
    recipe = recipe_of(tmp_path, ranks={"offload": True})
    with_room(monkeypatch)
    estimated = preflight_of(recipe).estimate
    assert estimated is not None
    whole = estimated.memory["host"]["parameters"]
    monkeypatch.setattr(module, "_USABLE", 1.0)
    with_room(monkeypatch, host=whole - 1)
    with pytest.raises(RecipeError, match="cannot load its model: each process builds it whole in host memory"):
        preflight_of(recipe)


def test_whole_host_budget_counts_as_pinned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory beside a device must hold the whole budget, not only the used part."""
    monkeypatch.setattr(module, "_USABLE", 1.0)
    estimated = Estimate({"host": 3 * MIB}, {}, {"device": {}, "host": {"o": 3 * MIB, "parameters": MIB}})
    free = {"device": 0, "host": 9 * MIB}
    module._check(recipe_of(tmp_path, device_budget="1MiB", host_budget="8MiB"), estimated, free, 512)
    with pytest.raises(RecipeError, match=r"hold 10\.0 MiB in its host tier \(the rest of host_budget 6\.0 MiB"):
        module._check(recipe_of(tmp_path, device_budget="1MiB", host_budget="9MiB"), estimated, free, 512)


def test_a_run_writes_its_plan_and_keeps_to_it(tmp_path: Path) -> None:
    """Bytes over the lanes are those that the step of `metrics.jsonl` moved."""
    recipe = recipe_of(tmp_path, device_budget="4MiB", offload_dir=str(tmp_path))
    train(recipe, Display())
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert plan["moved"] == {lane: counted["bytes"] for lane, counted in metrics["lanes"].items() if lane != "comm"}
    assert plan["peaks"]["disk"] == metrics["tiers"]["disk"] > 0
    assert "seconds" not in plan


def test_preflight_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_room(monkeypatch, device=1)
    train(recipe_of(tmp_path, preflight=False), Display())
    assert not (tmp_path / "run" / "plan.json").exists()


def _train_in_a_job(folder: str) -> None:
    train(load_recipe(Path(folder) / "recipe.yaml"), Display())


def test_one_process_can_offload(tmp_path: Path) -> None:
    """Offloaded parameters change no loss. That run has a process of its own, since it joins a process group."""
    losses = []
    for offload in (False, True):
        recipe = recipe_of(
            tmp_path, context=512, steps=2, output=str(tmp_path / f"run-{offload}"), ranks={"offload": offload}
        )
        if offload:
            (tmp_path / "recipe.yaml").write_text(dump_recipe(recipe))
            run(1, _train_in_a_job, str(tmp_path))
        else:
            train(recipe, Display())
        lines = (tmp_path / f"run-{offload}" / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
        plan = json.loads((tmp_path / f"run-{offload}" / "plan.json").read_text())
        assert ("optimizer" in plan["holders"]["host"]) is offload
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
