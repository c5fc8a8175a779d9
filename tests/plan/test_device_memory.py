"""Simulated device memory: every storage counts once, while it is alive, under its label."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from families import build
from torch import Tensor

from trunkline.distributed.mesh import ParallelDims
from trunkline.offload.lanes.sim_clock import QueueSpeeds, SimClock
from trunkline.plan.device_memory import DeviceMemory, MemoryTally
from trunkline.plan.estimate import estimate
from trunkline.plan.model_states import AdamWSpec
from trunkline.plan.op_tracer import OpTracer


def traced(run: Callable[[], object], *known: Tensor) -> DeviceMemory:
    """Trace a function and return the memory; `at_end` holds the bytes while its result is still alive."""
    memory = DeviceMemory()
    memory.ignore(known)
    tracer = OpTracer(None, SimClock(QueueSpeeds()), memory)
    with tracer.tracing():
        held = run()
        memory.at_end = memory.held
        del held
    return memory


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


@pytest.mark.parametrize("times", [1, 3])
def test_a_view_takes_no_memory(times: int) -> None:
    """`_unsafe_view` too, whose schema claims a new tensor: from the output cache as from PyTorch."""
    x = meta(4, 6)
    views = {
        "view": lambda: x.view(-1), "transpose": lambda: x.t(), "split": lambda: x.split(2),
        "expand": lambda: x[:1].expand(9, 6), "unsafe": lambda: torch.ops.aten._unsafe_view(x, [24]),
    }  # fmt: skip
    for name, view in views.items():
        memory = traced(lambda view=view: [view() for _ in range(times)], x)
        assert (memory.peak, memory.held) == (0, 0), name


def test_a_linear_layer_on_three_dimensions_makes_one_tensor() -> None:
    x, w = meta(2, 5, 8), meta(16, 8)
    memory = traced(lambda: [F.linear(x, w) for _ in range(3)], x, w)
    assert memory.at_end == memory.peak == 3 * 2 * 5 * 16 * 4
    assert memory.held == 0


def test_in_place_operators_take_no_memory_and_dropped_tensors_free_theirs() -> None:
    x = meta(1000)

    def run() -> None:
        a = x + 1  # 4,000 bytes
        a.mul_(2).add_(x)
        b = a.exp()  # 4,000 more
        del a
        c = b[:10].clone()  # 40 more, when the first are gone
        assert c.shape == (10,)

    memory = traced(run, x)
    assert (memory.peak, memory.held) == (8_000, 0)


def test_forward_and_backward_by_hand() -> None:
    """Two matrices with a relu between: 10 x 8 to 16 to 4.

    Forward keeps h = relu(x w1) (its input is freed) and ends with y and its sum. In backward y and the sum are held,
    and h until its layer is through.
    """
    x = meta(10, 8)
    w1, w2 = torch.nn.Parameter(meta(8, 16)), torch.nn.Parameter(meta(16, 4))
    inner, outer, total = 10 * 16 * 4, 10 * 4 * 4, 4
    peaks = []

    memory = DeviceMemory()
    memory.ignore([x, w1, w2])
    with OpTracer(None, SimClock(QueueSpeeds()), memory).tracing():
        h = (x @ w1).relu()
        peaks.append(memory.peak)
        y = h @ w2
        loss = y.sum()
        peaks.append(memory.held)
        del h, y
        memory.reset_peak()
        loss.backward()
        peaks.append(memory.peak)
        del loss
    assert peaks[0] == 2 * inner
    assert peaks[1] == inner + outer + total
    # y is gone, nobody needs it. h, the loss and d loss (a scalar, expanded to dy) are there; dw2 is made, then dh, and
    # d(x w1) while h, which relu's backward looks at, and dh are still there.
    assert peaks[2] == inner + 2 * total + w2.nbytes + 2 * inner
    assert memory.held == w1.nbytes + w2.nbytes
    assert w1.grad is not None


def test_a_tally_keeps_the_labels_of_its_peak() -> None:
    tally, told = MemoryTally(), []
    tally.on_change = told.append
    tally.add("a", 10)
    tally.label("labelled", 4)
    tally.add("b", 5)
    tally.add("a", -10)
    assert (tally.held, tally.peak) == (5, 15)
    assert +tally.parts_at_peak == {"a": 10, "labelled": 4, "b": 5}
    tally.reset_peak()
    assert (tally.peak, +tally.parts_at_peak) == (5, {"labelled": 4, "b": 5})
    assert told == [10, 15, 5]


MODEL = build("llama", torch.float32)
SIZES = {name: sum(p.nbytes for p in part.parameters()) for name, part in (
    ("all", MODEL), ("layer", MODEL.model.layers[0]), ("head", MODEL.lm_head)
)}  # fmt: skip


def test_parts_of_a_step() -> None:
    """The peak lies in the backward of the highest layer: its gradients are there, and the head's, and no others."""
    found = estimate(MODEL, 64, chunk_size=16, optimizer=AdamWSpec())
    held = found.memory["device"]
    assert held["parameters"] == SIZES["all"]
    assert held["optimizer"] == 2 * SIZES["all"]
    assert set(held) == {
        "parameters", "optimizer", "gradients", "layer inputs", "attention outputs", "keys and values",
        "gradients of keys and values", "gradients of hidden states", "activations of a chunk",
    }  # fmt: skip
    assert held["activations of a chunk"] > 0
    without = estimate(MODEL, 64, chunk_size=16)
    assert set(held) - set(without.memory["device"]) == {"optimizer"}
    assert sum(held.values()) - sum(without.memory["device"].values()) == 2 * SIZES["all"]
    evaluated = estimate(MODEL, 64, chunk_size=16, backward=False, optimizer=AdamWSpec()).memory["device"]
    assert not {"gradients", "optimizer"} & set(evaluated)


def test_gradients_are_held_until_the_step_ends() -> None:
    """With so few tokens the peak is reached when all gradients exist."""
    held = estimate(MODEL, 4, chunk_size=4).memory["device"]
    assert held["gradients"] == SIZES["all"]


def test_the_peak_lies_between_the_peaks_of_its_parts() -> None:
    """It is at least the peak outside the stores, and at most both peaks together."""
    for n in (2, 4, 8):
        each = estimate(MODEL, 16 * n, chunk_size=16, optimizer=AdamWSpec())
        assert each.outside_stores < sum(each.memory["device"].values()) <= each.outside_stores + each.peaks["device"]


def test_gathered_parameters_are_on_the_device_and_freed() -> None:
    found = estimate(MODEL, 64, chunk_size=16, parallel_dims=ParallelDims(dp=2), optimizer=AdamWSpec()).memory
    assert found["device"]["gathered parameters"] == SIZES["all"] - 2 * SIZES["layer"]
    assert found["device"]["parameters"] == SIZES["all"] // 2
    assert found["host"] == {}
