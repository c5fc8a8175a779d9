"""Plans on machines that are small enough to try every candidate."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import others_in_soak
from families import build
from plan.profiles import constant

from trunkline.distributed.mesh import ParallelDims
from trunkline.plan import search_space
from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.meta_model import MetaModel
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.planner import DoesNotFit, Planner
from trunkline.plan.search_space import (
    Candidate,
    Cluster,
    TrainingJob,
    chunk_sizes,
    keep_options,
    longest_searched,
    meshes,
)
from trunkline.plan.simulated_sharding import ShardingSpec

MIB = 2**20
META_MODEL, TWO_LAYERS = (
    MetaModel.from_model(
        build("llama", torch.bfloat16, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2)
    )
    for layers in (4, 2)
)


def cluster(device_mib: float, *, devices: int = 1, host: int = 2**34) -> Cluster:
    """Return machines with so much usable memory on each device."""
    hardware = constant(memory_bytes=int((device_mib * MIB + 3 * 2**29) / 0.96))
    return Cluster(hardware, devices, host)


def test_the_plan_fits_and_is_the_fastest_of_the_simulated_candidates() -> None:
    planner = Planner(META_MODEL, cluster(64))
    plan = planner.best(TrainingJob(32_768))
    assert plan.excess <= 0
    assert plan.estimate.step is not None
    assert plan.alternatives
    assert all(seconds >= plan.estimate.step.seconds for _, seconds in plan.alternatives)
    assert plan.estimate.peaks["device"] <= plan.budgets.device


@pytest.mark.parametrize("hidden_mib", others_in_soak([4, 2**10], [4]))
def test_stores_shrink_when_the_step_holds_more_than_the_probe_showed(
    monkeypatch: pytest.MonkeyPatch, hidden_mib: int
) -> None:
    """The stores get less where the full step holds more outside them than the short step; else nothing fits."""
    shown = estimate

    def probe(*args: object, **kwargs: object) -> Estimate:
        found = shown(*args, **kwargs)  # type: ignore[arg-type]
        return replace(found, outside_stores=max(found.outside_stores - hidden_mib * MIB, 0))

    honest = Planner(META_MODEL, cluster(40)).best(TrainingJob(32_768))
    assert honest.excess <= 0
    monkeypatch.setattr("trunkline.plan.planner.estimate", probe)
    tight = Planner(META_MODEL, cluster(40)).best(TrainingJob(32_768))
    assert tight.excess <= 0
    assert 0 < tight.budgets.device <= honest.budgets.device + MIB
    with pytest.raises(DoesNotFit, match=r"too much with chunk|the chunks in flight take"):
        Planner(META_MODEL, cluster(4)).best(TrainingJob(32_768))


def test_loading_takes_the_whole_model_where_it_is_sharded() -> None:
    count = sum(p.numel() for p in META_MODEL.model.parameters())
    whole = [
        Planner(META_MODEL, cluster(64, devices=2))
        .best(TrainingJob(4_096, parallel_dims=ParallelDims(sp=2), sharding_spec=sharding_spec))
        .loading
        for sharding_spec in (ShardingSpec(zero=0), ShardingSpec(zero=3), ShardingSpec(zero=3, dtype=torch.float32))
    ]
    assert whole == [0, 2 * count, 4 * count]


def test_less_device_memory_gives_plans_that_hold_less_until_nothing_fits() -> None:
    job = TrainingJob(32_768)
    roomy, tight = (Planner(META_MODEL, cluster(size)).best(job) for size in (256, 24))
    assert sum(roomy.estimate.memory["device"].values()) > sum(tight.estimate.memory["device"].values())
    assert tight.estimate.moved["stash"] > roomy.estimate.moved["stash"] == 0
    with pytest.raises(DoesNotFit, match=r"needs .* before anything is kept .* too much with chunk"):
        Planner(META_MODEL, cluster(1)).best(job)


def test_the_host_budget_is_what_the_step_needs() -> None:
    plan = Planner(META_MODEL, cluster(24)).best(TrainingJob(32_768))
    budget = plan.settings["memory"]["host_budget"]
    assert budget == plan.estimate.reserved["host"]
    assert plan.estimate.peaks["host"] <= budget < 1.1 * plan.estimate.peaks["host"] + MIB


@pytest.mark.parametrize("device_mib", others_in_soak([16, 24, 40], [24]))
def test_the_longest_fits_and_an_eighth_more_does_not(device_mib: int) -> None:
    """Host memory limits the context; the search ends for every size of the device."""
    small = cluster(device_mib, host=64 * MIB)
    plan = Planner(TWO_LAYERS, small).longest(TrainingJob(4_096), timed=False)
    assert plan.excess <= 0
    assert plan.job.context % 1_024 == 0
    more = TrainingJob(plan.job.context * 9 // 8 // 1_024 * 1_024 + 1_024)
    planner = Planner(TWO_LAYERS, small)
    for keep, every in keep_options(more, 2):
        for chunk in chunk_sizes(more, small.hardware):
            candidate = Candidate(ParallelDims(), plan.candidate.sharding_spec, chunk, keep, every)
            assert planner._shortfall(more, candidate) is not None


def test_the_search_for_the_longest_ends_where_everything_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model on a large device: the search ends at so many chunks of the given size."""
    job = TrainingJob(4_096, fixed={"chunk_size": 4_096})
    assert longest_searched(job, cluster(1).hardware) == 512 * 4_096
    monkeypatch.setattr(search_space, "MOST_CHUNKS", 4)
    assert Planner(TWO_LAYERS, cluster(2**14)).longest(job, timed=False).job.context == 16 * 4_096


def test_settings_of_the_job_are_not_changed() -> None:
    fixed = {"chunk_size": 4_096, "keep": (), "checkpoint_every": 2, "device_budget": 20 * MIB}
    plan = Planner(META_MODEL, cluster(256)).best(TrainingJob(16_384, fixed=fixed))
    assert plan.candidate.streaming == {"chunk_size": 4_096, "keep": (), "checkpoint_every": 2}
    assert plan.budgets.device == 20 * MIB


def test_a_fixed_checkpoint_every_beyond_half_the_layers_is_tried() -> None:
    plan = Planner(TWO_LAYERS, cluster(256)).best(TrainingJob(4_096, fixed={"checkpoint_every": 8}))
    assert plan.candidate.checkpoint_every == 8


def test_meshes_use_replicas_first_then_heads_then_rows() -> None:
    job = TrainingJob(1_024, batch_size=4)
    assert [(d.dp, d.sp, d.cp) for d in meshes(job, cluster(64, devices=8), 4)] == [(4, 2, 1), (2, 4, 1), (1, 4, 2)]
    with pytest.raises(ValueError, match="makes 2 ranks"):
        Planner(META_MODEL, cluster(64, devices=3)).best(
            TrainingJob(1_024, parallel_dims=ParallelDims(sp=2), sharding_spec=ShardingSpec())
        )


def test_micro_batches_hold_the_gradients_of_earlier_ones() -> None:
    planner = [Planner(META_MODEL, cluster(64)).best(TrainingJob(4_096, micro_batches=n)) for n in (1, 2)]
    held = [sum(p.estimate.memory["device"].values()) for p in planner]
    count = sum(p.numel() for p in META_MODEL.model.parameters())
    assert planner[1].estimate.memory["device"]["gradients of earlier micro-batches"] == 4 * count
    assert held[1] == held[0] + 4 * count


def test_one_planner_gives_each_number_of_micro_batches_its_own_budgets() -> None:
    """Gradients of earlier micro-batches reduce the stores' budget, also in a planner that is used again."""
    planner = Planner(META_MODEL, cluster(64))
    candidate = Candidate(ParallelDims(), ShardingSpec(zero=0), 4_096)
    one, two = (planner.budgets(TrainingJob(4_096, micro_batches=n), candidate).device for n in (1, 2))
    assert two < one


def test_machines_that_are_none() -> None:
    for given in ({"devices": 0}, {"devices": True}, {"host_bytes": 0}, {"disk_bytes": -1}):
        with pytest.raises(ValueError, match="give"):
            Cluster(constant(), **{"devices": 1, "host_bytes": 1, **given})  # type: ignore[arg-type]


def test_device_hours() -> None:
    plan = Planner(META_MODEL, cluster(64)).best(TrainingJob(4_096, optimizer=AdamWSpec()))
    assert plan.estimate.step is not None
    assert plan.gpu_hours(4_096 * 3_600) == pytest.approx(plan.estimate.step.seconds)


def test_ranks_on_a_cpu_share_its_memory_once() -> None:
    """A profile that several ranks measured has one rank's memory; one that a single rank measured has all of it."""
    for memory in (2**33, 2**34):
        assert Cluster(constant("cpu", memory_bytes=memory), 2, 2**34).usable_bytes["device"] == int(2**33 * 0.9)
