"""A hardware profile as aligned text: compute, memory, moves, collectives, cost of an operator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trunkline.plan.figures import DIRECTIONS, MEMORY_KINDS
from trunkline.plan.hardware import Collective, Hardware

_DTYPES = ("bf16", "fp32")
_NAME, _CELL = 34, 16


def hardware_lines(machine: Hardware) -> list[str]:
    """Return a profile's figures as lines of aligned text."""
    lines = ["", _line("Compute, at its fastest", *_DTYPES)]
    lines += [_line(f"  {name}", *cells) for name, cells in _compute(machine.figures)]
    lines += ["", _line("Memory, by operation", "fastest", "large")]
    for kind in MEMORY_KINDS:
        rows = sorted(machine.figures["memory"][kind]["points"])
        lines.append(_line(f"  {kind}", _rate(max(rate for _, rate in rows)), _rate(rows[-1][1])))
    lines += ["", _line("Moves", "one way", "both at once")]
    lines += [_line(f"  {name}", _rate(alone), _rate(both)) for name, alone, both in _moves(machine)]
    lines += ["", "Collectives"]
    lines += [f"  {name:<16}{_collective(each, command)}" for name, each, command in (
        ("within a node", machine.intra, "torchrun --nproc-per-node N -m trunkline tune does"),
        ("between nodes", machine.inter, "torchrun over several nodes does"),
    )]  # fmt: skip
    lines += ["", "An operator"]
    lines.append(_line("  least time on the device", _seconds(machine.kernel_seconds)))
    lines.append(_line("  time of the host to issue it", _seconds(machine.host_seconds)))
    return lines


def _compute(figures: Mapping[str, Any]) -> Iterator[tuple[str, list[str]]]:
    """Yield names and cells of matrix products and attention."""
    yield "matrix products", [_fastest(figures["matmul"].get(dtype)) for dtype in _DTYPES]
    attention = figures["attention"]
    tables = attention[attention["default"]]
    dims = {int(dim) for direction in DIRECTIONS for table in tables[direction].values() for dim in table}
    for dim in sorted(dims):
        for direction in DIRECTIONS:
            cells = [_fastest(tables[direction].get(dtype, {}).get(str(dim))) for dtype in _DTYPES]
            yield f"attention {direction}, head dim {dim}", cells


def _moves(machine: Hardware) -> Iterator[tuple[str, float, float]]:
    link, disk = machine.link, machine.disk
    if link is not None:
        yield "host memory to device", link.to_device, link.both_to_device
        yield "device to host memory", link.to_host, link.both_to_host
    yield "disk to host memory", disk.read, disk.both_read
    yield "host memory to disk", disk.write, disk.both_write


def _collective(measured: Collective | None, command: str) -> str:
    if measured is None:
        return f"not measured: {command}"
    return f"{_rate(measured.bandwidth)} a device, the smallest takes {_seconds(measured.latency)}"


def _fastest(entry: Mapping[str, Sequence[Sequence[float]]] | None) -> str:
    if entry is None:
        return "-"
    rate = max(row[-1] for row in entry["points"])
    return f"{rate / 1e12:.3g} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:.3g} GFLOP/s"


def _rate(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.3g} GB/s" if nbytes < 1e12 else f"{nbytes / 1e9:,.0f} GB/s"


def _seconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} µs" if seconds < 1e-3 else f"{seconds * 1e3:.3g} ms"


def _line(name: str, *cells: str) -> str:
    return f"{name:<{_NAME}}{''.join(f'{cell:>{_CELL}}' for cell in cells)}"
