"""Simulated sharding: bytes gathered and reduced, their time, and the memory of a rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build
from plan.profiles import constant

from trunkline.distributed.mesh import ParallelDims
from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.hardware import figure
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.simulated_sharding import ShardingSpec

MODEL = build("llama", torch.float32)
ALL = sum(p.nbytes for p in MODEL.parameters())
LAYER = sum(p.nbytes for p in MODEL.model.layers[0].parameters())
OTHER = ALL - 3 * LAYER  # embedding, last norm and head
PIECES = len(list(MODEL.parameters()))
LATENCY, BANDWIDTH, UPLINK = 1e-5, 1e11, 2  # of the profile


def estimated(ranks: int, sharding_spec: ShardingSpec, **more: Any) -> Estimate:
    settings = {"device": "cuda", "hardware": constant(), "chunk_size": 16, "optimizer": AdamWSpec(), **more}
    return estimate(MODEL, 64, parallel_dims=ParallelDims(dp=ranks), sharding_spec=sharding_spec, **settings)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("zero", "gathers", "nbytes"),
    [
        (3, 2 * (3 + 1), 2 * ALL),  # each layer, and what is in none, in forward and again in backward
        (2, 3 + 2, 3 * LAYER + 2 * OTHER),  # layers stay whole until their backward
    ],
)
def test_seconds_of_gathers_and_reductions(ranks: int, zero: int, gathers: int, nbytes: int) -> None:
    found = estimated(ranks, ShardingSpec(zero=zero))
    away = (ranks - 1) / ranks  # of each rank's bytes
    assert found.step.busy["comm"] == pytest.approx((gathers + PIECES) * LATENCY + (nbytes + ALL) * away / BANDWIDTH)
    assert found.step.exposed["comm"] <= found.step.busy["comm"]
    held = found.memory["device"]
    assert (held["parameters"], held["optimizer"]) == (ALL // ranks, 2 * ALL // ranks)
    assert held["gathered parameters"] == (OTHER + LAYER if zero == 3 else ALL)
    assert found.memory["host"] == {}


def test_unsharded_replicas_all_reduce_their_gradients() -> None:
    found = estimated(2, ShardingSpec(zero=0))
    assert found.step.busy["comm"] == pytest.approx(PIECES * LATENCY + 2 * ALL / 2 / BANDWIDTH)
    assert found.memory["device"]["parameters"] == ALL
    assert "gathered parameters" not in found.memory["device"]


def test_the_next_layer_is_gathered_during_compute() -> None:
    """If compute takes longer than a gather, only two of four are waited for: what is in no layer, and the first."""
    found = estimated(2, ShardingSpec(zero=3), hardware=constant(kernel_seconds=1e-3), backward=False)
    assert found.step.exposed["comm"] == pytest.approx(2 * LATENCY + (LAYER + OTHER) / 2 / BANDWIDTH, rel=1e-6)
    assert found.step.busy["comm"] == pytest.approx(4 * LATENCY + ALL / 2 / BANDWIDTH, rel=1e-6)


def test_gradients_are_reduced_in_reduce_dtype() -> None:
    half = estimated(2, ShardingSpec(zero=3, reduce_dtype=torch.bfloat16))
    full = estimated(2, ShardingSpec(zero=3))
    assert full.step.busy["comm"] - half.step.busy["comm"] == pytest.approx(ALL / 2 / 2 / BANDWIDTH, rel=1e-6)


def test_master_shards_are_wider_than_gathered_parameters() -> None:
    """bf16 parameters, gathered as such, whose parts and gradients are fp32."""
    model = build("llama", torch.bfloat16)
    found = estimate(
        model,
        64,
        chunk_size=16,
        parallel_dims=ParallelDims(dp=2),
        sharding_spec=ShardingSpec(dtype=torch.float32),
        optimizer=AdamWSpec(),
    ).memory["device"]
    assert found["parameters"] == ALL // 2
    assert found["optimizer"] == 2 * (ALL // 2)
    assert found["gathered parameters"] == (OTHER + LAYER) // 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_offloaded_states_are_in_host_memory(ranks: int) -> None:
    rates = {"to_device": 2e10, "both_to_device": 2e10, "to_host": 2.5e10, "both_to_host": 2.5e10}
    link = {name: figure(value, "made up", "2026") for name, value in {**rates, "devices_per_uplink": UPLINK}.items()}
    found = estimated(ranks, ShardingSpec(offload=True), hardware=constant(link=link))
    own = ALL // ranks
    assert found.memory["host"] == {"parameters": own, "optimizer": 2 * own, "gradients": own}
    assert not {"parameters", "optimizer", "gradients"} & set(found.memory["device"])
    # Two devices share an uplink; each part goes in twice, and its gradient out once.
    share = min(ranks, UPLINK)
    assert found.step.busy["fetch"] == pytest.approx(2 * own / (20e9 / share), rel=1e-6)
    assert found.step.busy["stash"] == pytest.approx(own / (25e9 / share), rel=1e-3)
    assert (found.step.busy["comm"] > 0) == (ranks > 1)
    slow, fast = (
        estimated(ranks, ShardingSpec(offload=True), hardware=constant(host_bandwidth=bandwidth))
        for bandwidth in (1e11, 1e15)
    )
    begin, end = slow.step.phases[-1][1:]
    # Gradient, parameter and both moments, three of them written: of all devices of the node at once.
    assert slow.step.phases[-1][0] == "optimizer"
    assert end - begin == pytest.approx(8 * own * ranks / 1e11)
    assert fast.step.seconds < slow.step.seconds


def test_a_rank_alone_needs_no_collectives() -> None:
    found = estimated(1, ShardingSpec(offload=True), hardware=constant(intra=None, inter=None))
    assert found.step.busy["comm"] == 0
