"""Tensor parallelism in an estimate equals that of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cases import others_in_soak
from distributed.processes import run
from families import build
from oracle import tokens
from plan.profiles import constant
from torch import distributed as dist

import trunkline
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan import simulated_tp
from trunkline.plan.estimate import estimate
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.simulated_sharding import ShardingSpec

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2}


def measured(parallel_dims: dict[str, int], settings: dict[str, Any]) -> dict[str, Any]:
    mesh = trunkline.init_mesh(**parallel_dims)
    model = build("llama", torch.float32, **SHAPE)
    trunkline.shard(model, mesh, zero=0)
    trunkline.stream(model, mesh=mesh, **settings)
    ids = tokens(1, 64)
    model(input_ids=ids, labels=ids).loss.backward()
    meters = trunkline.stats(model)
    own = sum((p.to_local() if hasattr(p, "to_local") else p).nbytes for p in model.parameters())
    return {"device": meters.peaks["device"], "comm": meters.lanes["comm"].moved, "parameters": own}


@pytest.mark.parametrize("parallel_dims", others_in_soak([{"tp": 2}, {"tp": 2, "sp": 2}], [{"tp": 2}]))
def test_stores_and_parameters_equal_those_of_a_rank(parallel_dims: dict[str, int]) -> None:
    settings = {"chunk_size": 16}
    model = build("llama", torch.float32, **SHAPE)
    said = estimate(model, 64, parallel_dims=ParallelDims(**parallel_dims), sharding_spec=ShardingSpec(0), **settings)
    found = run(len(parallel_dims) * 2 if len(parallel_dims) > 1 else 2, measured, parallel_dims, settings)[0]
    assert said.peaks["device"] == found["device"]
    assert said.memory["device"]["parameters"] == found["parameters"]
    assert said.moved.get("comm", 0) == found["comm"]
    assert not dist.is_initialized()


def test_ranks_share_all_flops_and_all_reduces_take_time() -> None:
    model = build("llama", torch.float32, vocab_size=96, **SHAPE)  # which two ranks can halve
    hardware = constant(dtypes=("bf16", "fp32"))
    steps = [
        estimate(
            model, 64, chunk_size=16, parallel_dims=ParallelDims(tp=n), sharding_spec=ShardingSpec(0), hardware=hardware
        ).step
        for n in (1, 2)
    ]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[0].hardware_flops == steps[1].hardware_flops
    assert steps[0].model_flops == steps[1].model_flops
    assert steps[0].exposed["comm"] == 0
    # Two sums forward and two backward for each layer's chunk at least: forward, replay, gradients of inputs.
    assert steps[1].exposed["comm"] > 4 * 3 * model.config.num_hidden_layers * hardware.intra.latency  # type: ignore[union-attr]


def test_tensor_parallelism_is_refused_inside_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    meta_model = MetaModel.from_model(build("llama", torch.float32, **SHAPE))
    monkeypatch.setattr(simulated_tp.dist, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match="tp=2"), simulated_tp.tp_shard(meta_model, 2):
        pass
