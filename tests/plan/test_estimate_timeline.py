"""Estimated steps as timelines: the estimate's peaks, the work of its lanes, and the spike that chunks take away."""

from itertools import pairwise

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from trunkline.distributed.mesh import ParallelDims
from trunkline.plan import estimate_timeline
from trunkline.plan.estimate import estimate
from trunkline.plan.estimate_timeline import capacity_of, timeline_of, unchunked_timeline
from trunkline.plan.hardware import load
from trunkline.plan.model_states import AdamWSpec
from trunkline.report.timeline import Timeline

SEQ_LEN = 16_384


@pytest.fixture(scope="module")
def model():
    config = LlamaConfig(
        vocab_size=32_000, hidden_size=512, intermediate_size=1024, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=SEQ_LEN,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


# All on the device; most of it in host memory; over ranks, which exchange.
CASES = {
    "resident": {},
    "offloaded": {"device_budget": "60MiB", "host_budget": "2GiB"},
    "ranks": {"parallel_dims": ParallelDims(sp=4)},
}


@pytest.fixture(params=CASES, scope="module")
def step_estimate(request, model):
    settings = {"hardware": "h200", "chunk_size": 2048, "optimizer": AdamWSpec(), "timeline": True}
    return estimate(model, SEQ_LEN, **settings, **CASES[request.param])


@pytest.fixture(scope="module")
def timeline(step_estimate):
    return timeline_of(step_estimate, "a step", {"device": 2**37, "host": None})


def test_peaks_equal_those_of_the_estimate(step_estimate, timeline):
    for tier, parts in step_estimate.memory.items():
        assert timeline.peak(tier) == sum(parts.values())
        assert sum(timeline.holders[tier].values()) == sum(parts.values())
    assert timeline.peak("device") > 50 * 2**20


def test_memory_rises_and_falls_within_each_chunk(timeline):
    """A spike for each chunk of each layer's backward: an MLP's inner activations come and go."""
    (backward,) = (phase for phase in timeline.phases if phase.name == "backward")
    held = [nbytes for second, nbytes in timeline.memory["device"] if backward.begin <= second <= backward.end]
    inner = 2048 * 1024 * 2 // 4  # bytes of one activation of the MLP, of one of four ranks
    turns, extreme, rising = 0, held[0], True
    for nbytes in held:
        if (nbytes > extreme) == rising:
            extreme = nbytes
        elif abs(nbytes - extreme) > inner:
            turns, extreme, rising = turns + 1, nbytes, not rising
    assert turns >= 2 * 8 * 6


def test_lanes_work_as_long_as_in_the_estimate(step_estimate, timeline):
    busy = {lane: seconds for lane, seconds in step_estimate.step.busy.items() if seconds}
    for lane, seconds in busy.items():
        # What took less than the clock's nanosecond is not drawn.
        assert timeline.busy(lane) == pytest.approx(seconds, rel=1e-6)
        assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(timeline.lanes[lane])), lane
    waited = sum(timeline.exposed.values())
    optimizer = timeline.phases[-1]
    assert timeline.busy("compute") + waited <= optimizer.begin + 1e-6
    assert {label for _, _, label in timeline.lanes["compute"]} == {
        "embed", "head", "backward", *(f"{part} {layer}" for part in ("forward", "backward") for layer in range(6)),
    }  # fmt: skip


def test_phases_follow_each_other(step_estimate, timeline):
    assert [phase.name for phase in timeline.phases] == ["embed", "forward", "head", "backward", "optimizer"]
    assert all(a.end == b.begin for a, b in pairwise(timeline.phases))
    assert timeline.phases[-1].end == pytest.approx(timeline.seconds) == step_estimate.step.seconds


def test_json_round_trip(timeline):
    assert Timeline.from_json(timeline.to_json()) == timeline


def test_the_spike_is_smaller_in_chunks(model):
    settings = {"hardware": "h200", "optimizer": AdamWSpec()}
    after = timeline_of(estimate(model, SEQ_LEN, chunk_size=2048, timeline=True, **settings), "after", {})
    unchunked = unchunked_timeline(model, SEQ_LEN, title="before", **settings)
    # Logits of all tokens, in fp32, and their gradient exist at once.
    assert unchunked.peak("device") > SEQ_LEN * 32_000 * (4 + 4)
    assert unchunked.peak("device") > 4 * after.peak("device")
    assert unchunked.capacity == capacity_of(load("h200"))
    # Attention is computed once more: 4 FLOPs of the mathematics in the place of 3, and so with every matrix but the
    # head's.
    head = 6 * SEQ_LEN * 512 * 32_000
    assert unchunked.hardware_flops == pytest.approx((unchunked.model_flops - head) * 4 / 3 + head, rel=0.01)


def test_the_number_of_points_is_bounded_and_the_peak_is_kept(model, monkeypatch):
    monkeypatch.setattr(estimate_timeline, "MOST_POINTS", 200)
    many = estimate(model, SEQ_LEN, chunk_size=1024, hardware="h200", timeline=True)
    assert len(many.step.memory["device"]) > 400
    timeline = timeline_of(many, "many chunks", {})
    assert all(len(steps) <= 200 for steps in timeline.memory.values())
    assert timeline.peak("device") == sum(many.memory["device"].values())


def test_capacity_of_a_device_and_its_share_of_the_host():
    hardware = load("h200")
    assert capacity_of(hardware, 4)["host"] == hardware.host_bytes // 4
    assert capacity_of(hardware, 64)["host"] == hardware.host_bytes // hardware.devices_per_node


def test_an_estimate_without_time_or_timeline_is_refused(model):
    for settings in ({"timeline": True}, {"hardware": "h200"}):
        with pytest.raises(ValueError, match="timeline=True"):
            timeline_of(estimate(model, 4096, chunk_size=2048, **settings), "a step", {})
