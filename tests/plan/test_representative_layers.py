"""Layers that represent identical ones: the estimate equals that of all layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import others_in_soak
from families import build
from plan.profiles import constant

from trunkline.distributed.mesh import ParallelDims
from trunkline.hf.decoder import HuggingFaceDecoder
from trunkline.plan.estimate import Estimate, estimate
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.representative_layers import representatives
from trunkline.plan.simulated_sharding import ShardingSpec

LAYERS = 12
ALTERNATING = [("full_attention" if i % 3 == 2 else "sliding_attention") for i in range(LAYERS)]
TIGHT = {"offload_dir": ".", "disk_budget": "8MiB"}

# Settings, and how many of the twelve layers are gone through.
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "alike": ({}, 4),
    "a forward alone": ({"backward": False}, 4),
    "room for the inputs of some": ({"device_budget": "96KiB", "host_budget": "1MiB"}, 8),
    "three tiers": ({"device_budget": "64KiB", "host_budget": "96KiB", **TIGHT}, 12),
    "streamed": ({"device_budget": "48KiB", "host_budget": "4MiB", "attn_strategy": "streamed"}, 5),
    "head groups": ({"device_budget": "96KiB", "host_budget": "4MiB", "attn_strategy": "head_groups", "keep": ()}, 10),
    "groups of two": ({"checkpoint_every": 2}, 8),
    "a last group of one": ({"checkpoint_every": 2, "layers": 13, "keep": ("kv",)}, 9),
    "a last group of two": ({"checkpoint_every": 3, "layers": 17, "device_budget": "64KiB", "host_budget": "4MiB"}, 14),
    "groups, nothing kept": ({"checkpoint_every": 2, "keep": ()}, 8),
    "frozen below": ({"frozen": 7}, 8),
    "frozen below, one tier full": ({"frozen": 6, "device_budget": "64KiB", "host_budget": "4MiB"}, 10),
    "windows": ({"windows": True}, 8),
    "windows, streamed": (
        {"windows": True, "device_budget": "48KiB", "host_budget": "4MiB", "attn_strategy": "streamed"}, 9
    ),
    "ranks": ({"parallel_dims": ParallelDims(sp=2)}, 4),
    "replicas": ({"parallel_dims": ParallelDims(dp=2), "sharding_spec": ShardingSpec(zero=2)}, 4),
    "offloaded": ({"sharding_spec": ShardingSpec(offload=True)}, 4),
}  # fmt: skip


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[int]]:
    """Count the chunks that each layer of any model runs."""
    found: Counter[int] = Counter()
    layer = HuggingFaceDecoder.layer

    def counted(self: Any, index: int, x_BCE: torch.Tensor, *args: Any) -> Any:
        found[index] += x_BCE.shape[1] > 1  # a token alone is looked at, before anything is placed
        return layer(self, index, x_BCE, *args)

    monkeypatch.setattr(HuggingFaceDecoder, "layer", counted)
    return found


def both(name: str, calls: Counter[int], **more: Any) -> tuple[Estimate, Estimate, int]:
    """Return the estimates with representatives and with all layers, and the number of layers that the first ran."""
    given = {"hardware": constant(host_seconds=2e-6, kernel_seconds=1e-6), "optimizer": AdamWSpec(), "chunk_size": 16,
             "device": "cuda", **CASES[name][0], **more}  # fmt: skip
    windows, frozen, layers = given.pop("windows", False), given.pop("frozen", 0), given.pop("layers", LAYERS)
    changes = {"use_sliding_window": True, "sliding_window": 9, "layer_types": ALTERNATING} if windows else {}
    model = build("qwen2", torch.float32, num_hidden_layers=layers, **changes)
    if frozen:
        model.get_input_embeddings().requires_grad_(False)
        for layer in model.model.layers[:frozen]:
            layer.requires_grad_(False)
    calls.clear()
    some = estimate(model, 64, **given)
    layers_run = len(+calls)
    calls.clear()
    every = estimate(model, 64, extrapolate=False, **given)
    assert set(+calls) == set(range(layers))
    return some, every, layers_run


# Of each kind of placement and of layers one; the others in `make soak`.
EVERY_RUN = ("three tiers", "a last group of two", "frozen below, one tier full", "windows, streamed", "replicas")


@pytest.mark.parametrize("name", others_in_soak(CASES, EVERY_RUN))
def test_the_estimate_equals_that_of_all_layers(name: str, calls: Counter[int]) -> None:
    some, every, layers_run = both(name, calls)
    assert layers_run == CASES[name][1]
    assert some.peaks == every.peaks
    # Else it would say nothing of placements that differ from layer to layer.
    assert (some.peaks["host"] > 0) == ("host_budget" in CASES[name][0])
    assert (some.peaks["disk"] > 0) == ("offload_dir" in CASES[name][0])
    assert some.moved == every.moved
    assert some.memory == every.memory
    assert some.outside_stores == every.outside_stores
    a, b = some.step, every.step
    assert a.seconds == pytest.approx(b.seconds, rel=1e-9)
    assert (a.operators, a.hardware_flops, a.model_flops) == (b.operators, b.hardware_flops, b.model_flops)
    for lane, seconds in b.busy.items():
        assert a.busy[lane] == pytest.approx(seconds, rel=1e-9, abs=1e-12), lane
        assert a.exposed[lane] == pytest.approx(b.exposed[lane], rel=1e-9, abs=1e-12), lane
    assert [phase for phase, _, _ in a.phases] == [phase for phase, _, _ in b.phases]
    for (_, begin, end), (_, b_begin, b_end) in zip(a.phases, b.phases, strict=True):
        assert (begin, end) == (pytest.approx(b_begin, rel=1e-9), pytest.approx(b_end, rel=1e-9))


def test_the_timeline_has_every_layer(calls: Counter[int]) -> None:
    some, every, _ = both("room for the inputs of some", calls, timeline=True)
    for found in (some, every):
        labels = {label for _, _, label in found.step.lanes["compute"]}
        assert labels == {"embed", "head", "backward", "forward",
                          *(f"{part} {i}" for part in ("forward", "backward") for i in range(LAYERS))} - {
                              "forward", *({"backward"} - labels)}  # fmt: skip
    tops = [max(nbytes for _, nbytes in r.step.memory["device"]) for r in (some, every)]
    assert tops[0] == tops[1] == sum(some.memory["device"].values())


def test_the_first_two_units_of_a_kind_and_neighbourhood_represent_the_others() -> None:
    assert representatives("aaaaaa") == {0: 0, 1: 1, 2: 2, 3: 2, 4: 2, 5: 5}
    assert representatives("abababab") == {0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 3, 6: 4, 7: 7}
    assert representatives("aabb") == {0: 0, 1: 1, 2: 2, 3: 3}
    assert representatives("") == {}
