"""One rank of an estimated mesh equals the ranks of a real one: bytes sent, and bytes held."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from cases import others_in_soak
from distributed.processes import run
from families import build
from oracle import tokens

import trunkline
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan.estimate import estimate
from trunkline.plan.simulated_sharding import ShardingSpec

HEAD_GROUPS: dict[str, Any] = {"chunk_size": 4, "device_budget": "40KiB", "attn_strategy": "head_groups"}
CASES: list[dict[str, Any]] = [
    {"chunk_size": 8},
    {"chunk_size": 8, "keep": ()},
    {"chunk_size": 8, "keep": ("attention", "kv"), "checkpoint_every": 2},
    {"chunk_size": 4, "device_budget": "16KiB", "attn_strategy": "streamed"},
]
# Two key/value heads; and four, of which two ranks have two each to take one after the other.
STEPS = [("llama", settings) for settings in CASES] + [("gpt2", settings) for settings in (CASES[0], HEAD_GROUPS)]
SEQ_LEN, BATCH = 40, 2


def stepped(
    parallel_dims: dict[str, int], steps: list[tuple[str, dict[str, Any]]], folder: str
) -> list[dict[str, Any]]:
    """Return this rank's peaks and moved bytes in a step of each case."""
    mesh = trunkline.init_mesh(**parallel_dims)
    ids = tokens(BATCH, SEQ_LEN)
    found = []
    for family, settings in steps:
        model = build(family, torch.float32)
        disk = {"offload_dir": folder} if "device_budget" in settings else {}
        trunkline.stream(model, mesh=mesh, **settings, **disk)
        model(input_ids=ids, labels=ids).loss.backward()
        meters = trunkline.stats(model)
        moved = {lane: traffic.moved for lane, traffic in meters.lanes.items()}
        found.append({"peaks": meters.peaks, "moved": moved})
    return found


@pytest.mark.parametrize(("axis", "number"), others_in_soak(itertools.product(["sp", "cp"], [0, 1]), [("sp", 1)]))
def test_peaks_and_moved_bytes_equal_those_of_the_ranks(axis: str, number: int, tmp_path: Any) -> None:
    steps = STEPS[number::2]
    first, second = run(2, stepped, {axis: 2}, steps, str(tmp_path))
    for (family, settings), real, other in zip(steps, first, second, strict=True):
        disk = {"offload_dir": tmp_path} if "device_budget" in settings else {}
        said = estimate(
            build(family, torch.float32),
            SEQ_LEN,
            batch_size=BATCH,
            parallel_dims=ParallelDims(**{axis: 2}),
            sharding_spec=ShardingSpec(zero=0),
            **settings,
            **disk,
        )
        assert {"peaks": said.peaks, "moved": said.moved} == real == other, (family, settings)
        assert said.moved["comm"] > 0
        assert (said.moved["stash"] > 0) == bool(disk)
