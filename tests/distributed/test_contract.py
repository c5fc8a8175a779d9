"""Inputs that ranks must agree on, and the end of a job when one rank fails."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from cases import others_in_soak
from families import build
from oracle import collect, tokens

import trunkline
from distributed.processes import outcomes, run, start
from trunkline.config import Progress
from trunkline.distributed import failure
from trunkline.distributed.mesh import ParallelDims


def streamed(parallel_dims: dict[str, int], **settings: Any) -> torch.nn.Module:
    mesh = trunkline.init_mesh(**parallel_dims)
    model = trunkline.shard(build("llama", torch.float32), mesh)
    return trunkline.stream(model, mesh=mesh, chunk_size=8, **settings)


def call(
    parallel_dims: dict[str, int], odd: int, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> tuple[str, float]:
    """Return the error of a forward after one rank changed its arguments, and its seconds; then run a valid one."""
    model = streamed(parallel_dims)
    rank = torch.distributed.get_rank()
    ids = tokens(1, 37)
    given = {"input_ids": ids, "labels": ids}
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"rank|labels") as refused:
        model(**(change(given) if rank == odd else given))
    seconds = time.monotonic() - begun
    model(**given).loss.backward()
    return str(refused.value), seconds


def _other_token(given: dict[str, Any]) -> dict[str, Any]:
    ids = given["input_ids"].clone()
    ids[0, 30] += 1
    return {**given, "input_ids": ids}


def _other_label(given: dict[str, Any]) -> dict[str, Any]:
    labels = given["labels"].clone()
    labels[0, 36] = -100
    return {**given, "labels": labels}


def _shorter(given: dict[str, Any]) -> dict[str, Any]:
    return {name: x[:, :30] for name, x in given.items()}


def _no_labels(given: dict[str, Any]) -> dict[str, Any]:
    return {"input_ids": given["input_ids"], "labels": None, "num_items_in_batch": 3, "shift_labels": given["labels"]}


def _wrong_shape(given: dict[str, Any]) -> dict[str, Any]:
    return {**given, "labels": given["labels"][:, :-1]}


@pytest.mark.parametrize(
    ("parallel_dims", "change", "says"),
    [
        ({"sp": 2}, _other_token, "rank 1 was given other tokens"),
        ({"cp": 2}, _other_label, "rank 1 was given other tokens"),
        ({"tp": 2}, _shorter, "rank 1 was given other tokens"),
        ({"sp": 2}, _no_labels, "rank 1 calls the model in another way"),
    ],
)
def test_different_inputs_are_refused_on_all_ranks(parallel_dims: dict[str, int], change: Any, says: str) -> None:
    for text, seconds in run(2, call, parallel_dims, 1, change):
        assert says in text
        assert seconds < 10


def test_refusal_of_one_rank_reaches_all_ranks() -> None:
    (others, _), (own, _) = run(2, call, {"dp": 2}, 1, _wrong_shape)
    assert own.startswith("labels must be")
    assert "rank 1 refused its arguments (labels must be" in others


def replicas() -> float:
    """Return the gradient norm of replicas with different lengths, and so different numbers of chunks."""
    model = streamed({"dp": 2})
    ids = tokens(1, 9 + 20 * torch.distributed.get_rank())
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return float(trunkline.clip_grad_norm_(model, 1.0))


def test_replicas_may_have_different_lengths() -> None:
    first, second = run(2, replicas)
    assert first == pytest.approx(second)


def other_weights() -> str:
    mesh = trunkline.init_mesh(sp=2)
    model = build("llama", torch.float32, seed=torch.distributed.get_rank())
    with pytest.raises(ValueError, match="holds other weights") as refused:
        trunkline.stream(model, mesh=mesh)
    return str(refused.value)


def test_different_weights_are_refused() -> None:
    assert run(2, other_weights)[0].startswith("rank 1 holds other weights")


def interrupted(parallel_dims: dict[str, int]) -> tuple[list[str], float, float]:
    """Leave a sweep with an error, or evaluate inside one, on all ranks; return messages and differences afterwards."""
    ids, wish, said, losses = tokens(1, 61), "", list[str](), list[float]()

    def progress(position: Progress) -> None:
        nonlocal wish
        if (position.part, position.layer, position.chunk) != (wish.split()[0] if wish else "", 1, 2):
            return
        evaluates, wish = wish.endswith("evaluate"), ""
        if not evaluates:
            raise ValueError(f"no more of {position.part}")
        with torch.no_grad():
            losses.append(float(model(input_ids=ids, labels=ids).loss))

    def step(wanted: str) -> dict[str, torch.Tensor]:
        nonlocal wish
        model.zero_grad()
        wish = wanted
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        losses.append(float(loss))
        return collect(model)

    mesh = trunkline.init_mesh(**parallel_dims)
    model = trunkline.stream(build("llama", torch.float32), mesh=mesh, chunk_size=8, progress=progress)
    steps = [step("")]
    for part in ("forward", "backward"):
        try:
            step(part)
        except ValueError as error:
            said.append(str(error))
    steps += [step(f"{part} evaluate") for part in ("forward", "backward")]
    worst = max(float((other[name] - x).abs().max()) for other in steps for name, x in steps[0].items())
    return said, worst, max(losses) - min(losses)


@pytest.mark.parametrize("parallel_dims", others_in_soak([{"sp": 2}, {"cp": 2}], [{"sp": 2}]), ids=str)
def test_training_goes_on_after_an_interrupted_sweep(parallel_dims: dict[str, int]) -> None:
    for said, *differences in run(2, interrupted, parallel_dims):
        assert said == ["no more of forward", "no more of backward"]
        assert differences == [0, 0]


# -- faults ----------------------------------------------------------------------------------------------------------


def fail(how: str, folder: str, log: str, failing: int) -> None:
    """Train until one rank fails in the middle of its second backward."""
    rank, seen = int(os.environ["RANK"]), 0
    os.dup2(os.open(f"{log}-{rank}", os.O_WRONLY | os.O_CREAT), 2)

    def progress(position: Progress) -> None:
        nonlocal seen
        seen += position.part == "backward" and position.layer == 1 and position.chunk == 2
        if rank == failing and seen == 2:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the disk is on fire")

    model = streamed({"sp": 2}, device_budget=40_000, offload_dir=folder, progress=progress)
    ids = tokens(1, 61)
    try:
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
    except RuntimeError:
        if how == "lives on" and rank == failing:
            time.sleep(60)
        raise


@pytest.mark.parametrize("failing", others_in_soak([0, 1], [0]))
def test_killed_rank_is_noticed_if_rank_0_holds_the_store(failing: int, tmp_path: Path) -> None:
    """Launchers other than torchrun have no store of their own."""
    begun = time.monotonic()
    started = start(2, fail, "killed", str(tmp_path), str(tmp_path / "stderr"), failing, launcher=False)
    found = outcomes(started)
    assert time.monotonic() - begun < 30
    kind, text, _ = found[1 - failing][1]
    assert kind == "RankError"
    assert "another rank has ended: it had fewer batches" in text


@pytest.mark.parametrize("how", others_in_soak(["raises", "killed", "lives on"], ["raises", "killed"]))
def test_failed_rank_stops_the_others_with_its_reason(how: str, tmp_path: Path) -> None:
    begun = time.monotonic()
    scratch, log = tmp_path / "scratch", tmp_path / "stderr"
    scratch.mkdir()
    started = start(2, fail, how, str(scratch), str(log), 1)
    if how == "lives on":
        started.processes[0].join(30)
        assert started.processes[0].exitcode == 1
        started.processes[1].kill()
        assert "error: rank 1 failed: RuntimeError: the disk is on fire" in Path(f"{log}-0").read_text()
    found = outcomes(started)
    assert time.monotonic() - begun < 30
    assert all(process.exitcode != 0 for process in started.processes)
    assert not list(scratch.iterdir())
    if how == "raises":
        kind, text, _ = found[0][1]
        assert kind == "RankError"
        assert text.startswith("rank 1 failed: RuntimeError: the disk is on fire (this was rank 0")
    if how == "killed":
        kind, text, _ = found[0][1]
        assert kind == "RankError"
        assert "another rank has ended: it had fewer batches" in text


# -- degrees ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parallel_dims", "world", "says"),
    [
        (ParallelDims(sp=3), 8, ["world size of 8", "3 does not"]),
        (ParallelDims(dp=3, sp=2), 8, ["makes 6 ranks", "set dp=4"]),
        (ParallelDims(cp=0), 8, ["cp=0", "positive whole number"]),
    ],
)
def test_degrees_must_multiply_to_the_world_size(parallel_dims: ParallelDims, world: int, says: list[str]) -> None:
    with pytest.raises(ValueError, match="=") as refused:
        parallel_dims.check_world(world)
    assert all(part in str(refused.value) for part in says)


@pytest.mark.parametrize(
    ("parallel_dims", "says"),
    [
        (ParallelDims(sp=6), ["9 query and 3 key/value heads", "valid values of sp are 1, 3, 9", "cp=6", "sp=3, cp=2"]),
        (ParallelDims(tp=2), ["tp=2 does not divide", "valid values of tp are 1, 3"]),
        (ParallelDims(tp=3, sp=2), ["3 query heads on each of 3 tp ranks", "valid values of sp are 1, 3"]),
    ],
)
def test_degrees_must_divide_the_heads(parallel_dims: ParallelDims, says: list[str]) -> None:
    with pytest.raises(ValueError, match="heads") as refused:
        parallel_dims.check_heads(9, 3)
    assert all(part in str(refused.value) for part in says)


def other_settings() -> str:
    mesh = trunkline.init_mesh(sp=2)
    model = build("llama", torch.float32)
    trunkline.stream(model, mesh=mesh, chunk_size=8 + 8 * torch.distributed.get_rank())
    ids = tokens(1, 37)
    with pytest.raises(ValueError, match="same settings of stream") as refused:
        model(input_ids=ids, labels=ids)
    return str(refused.value)


def test_different_settings_are_refused() -> None:
    assert all(text.startswith("rank 1 calls the model in another way") for text in run(2, other_settings))


def too_small(folder: str) -> float:
    """Return the seconds of a slow step after all ranks have refused a budget."""
    model = streamed({"sp": 2}, device_budget=100, offload_dir=folder)
    ids = tokens(1, 37)
    with pytest.raises(ValueError, match="device_budget leaves 100 B"):
        model(input_ids=ids, labels=ids)
    trunkline.unstream(model)
    begun = time.monotonic()

    def progress(position: Progress) -> None:
        time.sleep(0.05)

    mesh = model._trunkline_sharding.mesh
    trunkline.stream(model, mesh=mesh, chunk_size=8, progress=progress)
    with patch.object(failure, "_GRACE", 0.5):
        model(input_ids=ids, labels=ids).loss.backward()
    return time.monotonic() - begun


def test_refusal_by_all_ranks_is_no_failure(tmp_path: Path) -> None:
    assert min(run(2, too_small, str(tmp_path))) > 1.5


def other_batches(folder: str) -> None:
    """Train on batches of different sizes: all ranks measure bytes per token together, or none does."""
    model = streamed({"dp": 2}, device_budget=60_000, offload_dir=folder)
    rank = torch.distributed.get_rank()
    for batch in (1, 1 + rank, 2 - rank):
        ids = tokens(batch, 37)
        model(input_ids=ids, labels=ids).loss.backward()


def test_replicas_may_have_different_batch_sizes(tmp_path: Path) -> None:
    run(2, other_batches, str(tmp_path))
