"""Time of an operator on host and device; and collectives that a profile may lack."""

import pytest
import torch
from families import build
from plan.profiles import constant

import trunkline
from trunkline.distributed.mesh import ParallelDims
from trunkline.plan import host_overhead, measurements

CPU = torch.device("cpu")


def seconds(machine: object, host: float) -> tuple[float, int]:
    return host_overhead.estimated_step(host_overhead.tiny_model(torch.float32), machine, host)


@pytest.mark.parametrize(("device_type", "beyond"), [("cpu", 0.003), ("cuda", 0.5)])
def test_with_the_hosts_time_an_estimate_takes_as_long_as_the_step(
    device_type: str, beyond: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = constant(device_type, kernel_seconds=1e-6)
    of_the_device, operators = seconds(machine, 0.0)
    assert operators > 2_000
    took = of_the_device + beyond
    monkeypatch.setattr(host_overhead, "_step_seconds", lambda model, device: took)
    host = host_overhead.host_seconds(machine, CPU)
    assert seconds(machine, host)[0] == pytest.approx(took, rel=0.011)
    if device_type == "cpu":  # where nothing overlaps
        assert host == pytest.approx(beyond / operators)


def test_a_step_faster_than_its_estimate_has_no_negative_host_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_overhead, "_step_seconds", lambda model, device: 1e-6)
    assert host_overhead.host_seconds(constant("cpu", kernel_seconds=1e-6), CPU) == 1e-9


def test_the_least_time_of_a_kernel_is_plausible() -> None:
    assert 1e-8 < measurements.kernel_seconds(CPU) < 1e-3


def test_operators_are_counted_once_each() -> None:
    """On a CPU each costs the host its time, whatever stands for what."""
    model = build("llama", torch.float32, num_hidden_layers=6)
    steps = [
        trunkline.estimate(
            model, 64, hardware=constant("cpu", host_seconds=host), chunk_size=16, extrapolate=short
        ).step
        for host in (1e-15, 1.0)
        for short in (True, False)
    ]
    assert len({step.operators for step in steps}) == 1
    operators = steps[0].operators
    assert steps[2].seconds - steps[0].seconds == pytest.approx(operators, rel=1e-6)
    fewer = build("llama", torch.float32, num_hidden_layers=3)
    half = trunkline.estimate(fewer, 64, hardware=constant("cpu"), chunk_size=16).step.operators
    assert 1.7 * half < operators < 2 * half


def test_a_mesh_within_a_node_needs_no_figures_between_nodes() -> None:
    machine = constant(inter=None)
    model = build("llama", torch.float32)
    assert trunkline.estimate(model, 64, hardware=machine, parallel_dims=ParallelDims(sp=2)).step.busy["comm"] > 0
    with pytest.raises(
        ValueError, match=r"'made-up' \(devices_per_node 4\) .* between nodes, which 8 ranks need: .*torc"
    ):
        trunkline.estimate(model, 64, hardware=machine, parallel_dims=ParallelDims(dp=4, sp=2))


def test_a_mesh_needs_figures_within_a_node() -> None:
    machine = constant(intra=None, inter=None)
    assert (machine.intra, machine.inter) == (None, None)
    with pytest.raises(
        ValueError, match=r"within a node, which 2 ranks need: measure them with torchrun .*intra\.band"
    ):
        trunkline.estimate(build("llama", torch.float32), 64, hardware=machine, parallel_dims=ParallelDims(cp=2))
    assert trunkline.estimate(build("llama", torch.float32), 64, hardware=machine).step is not None
