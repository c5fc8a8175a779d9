"""Time of an estimated step: closed forms on machines whose speeds are the same at all sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import build
from plan.profiles import KINDS, constant

from trunkline.plan.estimate import StepTiming, estimate
from trunkline.plan.hardware import figure, points
from trunkline.plan.model_states import AdamWSpec

S, C, E, V, LAYERS, HEADS = 32, 8, 32, 97, 3, 4
N = S // C
LEAN = {"device_budget": "24KiB", "host_budget": "1MiB", "attn_strategy": "streamed", "chunk_size": 4}


def one(value: float) -> dict[str, Any]:
    return figure(value, "made up", "2026")


def link(there: float, both: float | None = None) -> dict[str, Any]:
    """Return a link with the same speed in both directions."""
    together = one(there if both is None else both)
    return {"to_device": one(there), "to_host": one(there), "both_to_device": together, "both_to_host": together,
            "devices_per_uplink": one(1)}  # fmt: skip


def memory(rate: float) -> dict[str, Any]:
    return {kind: points([[1, rate]], "made up", "2026") for kind in KINDS}


def step(family: str = "llama", dtype: torch.dtype = torch.float32, **given: Any) -> StepTiming:
    machine = {name: given.pop(name) for name in list(given) if name in _MACHINE}
    found = estimate(build(family, dtype), S, device="cuda", hardware=constant(**machine),
                     **{"chunk_size": C, **given}).step  # fmt: skip
    assert found is not None
    return found


_MACHINE = ("link", "memory", "interference", "kernel_seconds", "host_seconds")
_NOTHING = {"memory": memory(1e30), "kernel_seconds": 1e-30, "host_seconds": 1e-30}


@pytest.mark.parametrize(
    ("keep", "forwards", "projections"),
    [(("attention", "kv"), 1, 0), (("attention",), 1, N - 1), (("kv",), 2, 0), ((), 2, N - 1)],
)
def test_seconds_are_flops_over_their_rates(keep: tuple[str, ...], forwards: int, projections: int) -> None:
    """GPT-2, whose positions are a table: a layer has 12 E² weights, and one product for queries, keys and values."""
    found = step("gpt2", torch.bfloat16, keep=keep, **_NOTHING)
    layer = 2 * S * 12 * E * E
    again = projections * 2 * C * 3 * E * E  # of all chunks but the last, whose keys and values are met first
    head = 2 * S * E * V
    flops = LAYERS * (4 * layer + again) + 3 * head
    pairs = HEADS * S * (S + 1) // 2
    attention = LAYERS * pairs * 2 * (E // HEADS)  # scores, and outputs
    narrow = E / HEADS / 128  # below the heads that are known a pair takes as long as with those
    seconds = flops / 1e13 + (forwards * 2 * attention / 2e14 + 5 * attention / 1.5e14) / narrow
    assert found.seconds == pytest.approx(seconds, rel=1e-9)
    assert found.hardware_flops == flops + (forwards * 2 + 4) * attention
    assert found.peak_flops == 4e14
    assert found.tokens_per_second == pytest.approx(S / seconds)
    assert found.mfu == pytest.approx(found.model_flops / seconds / 4e14)


def test_seconds_are_bytes_over_their_rate() -> None:
    """If only memory is slow, half the speed is twice the time; the optimizer's 32 bytes a parameter, too."""
    slow = step(memory=memory(1e6), optimizer=AdamWSpec())
    assert slow.seconds == pytest.approx(2 * step(memory=memory(2e6), optimizer=AdamWSpec()).seconds, rel=1e-3)
    name, begin, end = slow.phases[-1]
    parameters = sum(p.numel() for p in build("llama").parameters())
    assert (name, end - begin) == ("optimizer", pytest.approx(32 * parameters / 1e6))
    assert slow.seconds == end


def test_a_step_takes_at_least_a_launch_for_each_kernel() -> None:
    """With a second for each, a step is as many seconds as kernels; views are none."""
    found = step(kernel_seconds=1.0)
    assert found.seconds == pytest.approx(round(found.seconds), abs=1e-3)
    assert 0.4 * found.operators < found.seconds < 0.7 * found.operators


def test_a_slow_host_holds_the_device_up() -> None:
    """Issued ahead: the longer of the two. On a CPU, which waits: their sum."""
    device, host = step(kernel_seconds=1e-3).seconds, 1e-3 * step().operators
    assert step(kernel_seconds=1e-3, host_seconds=1e-6).seconds == pytest.approx(device, rel=1e-3)
    assert step(host_seconds=1e-3).seconds == pytest.approx(host, rel=1e-3)


def test_compute_waits_for_a_slow_link() -> None:
    quick, slow = (step(link=link(rate), **LEAN) for rate in (1e15, 1e6))
    moved = estimate(build("llama", torch.float32), S, device="cuda", **LEAN).moved
    for lane in ("fetch", "stash"):
        assert slow.busy[lane] == pytest.approx(moved[lane] / 1e6)
        assert quick.exposed[lane] < 0.01 * quick.seconds
    # Nothing else takes time, beside a link that is busy nearly always.
    assert sum(slow.exposed.values()) > 0.99 * slow.seconds
    assert slow.seconds > max(slow.busy.values())


def test_two_buffers_hide_moves_that_one_exposes() -> None:
    """If moves take no longer than kernels: with one buffer nearly all are waited for, with two next to none."""
    exposed = {}
    for prefetch in (1, 2):
        found = step(link=link(1e9), kernel_seconds=1e-6, prefetch=prefetch, **LEAN)
        exposed[prefetch] = sum(found.exposed.values()) / sum(found.busy.values())
    assert exposed[1] > 0.9
    assert exposed[2] < 0.2


def test_two_directions_share_a_link() -> None:
    """At half the speed while both are busy, which is nearly always: longer, and at most twice as long."""
    alone, shared = (step(link=link(1e6, both), **LEAN) for both in (1e6, 5e5))
    assert 1.2 * alone.seconds < shared.seconds <= 2 * alone.seconds
    assert sum(shared.busy.values()) > sum(alone.busy.values())


def test_chunks_on_disk_go_over_the_link_too() -> None:
    """Chunks go over both; a lane is busy with each."""
    lean = {**LEAN, "host_budget": "8KiB", "offload_dir": ".", "disk_budget": "1MiB"}
    slow = {name: one(1e5) for name in ("read", "write", "both_read", "both_write")}
    below, above = (estimate(build("llama", torch.float32), S, device="cuda", hardware=constant(disk=slow), **given)
                    for given in (lean, LEAN))  # fmt: skip
    assert below.peaks["disk"] > 0 == above.peaks["disk"]
    # All in host memory: a link that nothing waits long for.
    assert below.step.seconds > below.step.busy["fetch"] > 100 * above.step.busy["fetch"]


def test_a_busy_lane_slows_compute() -> None:
    """By half all the time: twice as long; moves that take no time slow nothing down."""
    # Such that fetches are under way most of the time, and hardly waited for.
    given = {"link": link(1e9), "kernel_seconds": 1e-6, **LEAN}
    base, slowed = step(**given), step(interference={"fetch": one(0.5)}, **given)
    compute = base.seconds - sum(base.exposed.values())
    assert slowed.seconds - sum(slowed.exposed.values()) == pytest.approx(compute + slowed.busy["fetch"] / 2, rel=0.1)
    quick = {**given, "link": link(1e15)}
    assert step(interference={"fetch": one(0.5)}, **quick).seconds == pytest.approx(step(**quick).seconds, rel=1e-3)


def test_phases_cover_the_whole_step() -> None:
    found = step(optimizer=AdamWSpec())
    assert [name for name, _, _ in found.phases] == ["embed", "forward", "head", "backward", "optimizer"]
    assert found.phases[0][1] == 0
    assert all(a[2] == b[1] for a, b in zip(found.phases, found.phases[1:], strict=False))
    forward = step(backward=False, optimizer=AdamWSpec())
    assert [name for name, _, _ in forward.phases] == ["embed", "forward", "head"]
    assert forward.model_flops == found.model_flops // 3
