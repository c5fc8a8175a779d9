"""A hardware profile as aligned text: compute, memory, moves, collectives, cost of an operator."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from trunkline.plan.hardware import Hardware
from trunkline.plan.hardware.interpolation import AttentionSamples, RateSamples
from trunkline.plan.hardware.profile_schema import Dtype, MemoryKind

_DTYPES: tuple[Dtype, ...] = ("bf16", "fp32")


def hardware_lines(machine: Hardware) -> Iterator[str]:
    """Yield a profile's figures as lines of aligned text; compute in bf16 and fp32 only."""
    yield from ("", _line("Compute, at its fastest", *_DTYPES))
    yield _line("  matrix products", *(_fastest(machine.matmul.get(dtype)) for dtype in _DTYPES))
    tables = machine.attention.kernels[machine.attention_kernel]
    for dim in sorted({dim for dims in tables.forward.values() for dim in dims}):
        for direction, table in (("forward", tables.forward), ("backward", tables.backward)):
            cells = [_fastest(table.get(dtype, {}).get(dim)) for dtype in _DTYPES]
            yield _line(f"  attention {direction}, head dim {dim}", *cells)
    yield from ("", _line("Memory, by operation", "fastest", "large"))
    for kind in get_args(MemoryKind):
        curve = machine.memory[kind]
        yield _line(f"  {kind}", _rate(curve.fastest), _rate(curve.at_largest))
    yield from ("", _line("Moves", "one way", "both at once"))
    link, disk = machine.link, machine.disk
    if link is not None:
        yield _line("  host memory to device", _rate(link.to_device), _rate(link.both_to_device))
        yield _line("  device to host memory", _rate(link.to_host), _rate(link.both_to_host))
    yield _line("  disk to host memory", _rate(disk.read), _rate(disk.both_read))
    yield _line("  host memory to disk", _rate(disk.write), _rate(disk.both_write))
    yield from ("", "Collectives")
    for scope, collective, command in (
        ("within a node", machine.intra, "torchrun --nproc-per-node N -m trunkline tune"),
        ("between nodes", machine.inter, "torchrun over several nodes"),
    ):
        text = f"not measured: {command}"
        if collective is not None:
            text = f"{_rate(collective.bandwidth)} a device, the smallest takes {_seconds(collective.latency)}"
        yield f"  {scope:<16}{text}"
    yield from ("", "An operator", _line("  least time on the device", _seconds(machine.kernel_seconds)))
    yield _line("  time of the host to issue it", _seconds(machine.host_seconds))


def _line(name: str, *cells: str) -> str:
    return f"{name:<34}{''.join(f'{cell:>16}' for cell in cells)}"


def _fastest(samples: RateSamples | AttentionSamples | None) -> str:
    if samples is None:
        return "-"
    return (
        f"{samples.fastest / 1e12:.3g} TFLOP/s" if samples.fastest >= 1e12 else f"{samples.fastest / 1e9:.3g} GFLOP/s"
    )


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB/s" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"
