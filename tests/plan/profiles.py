"""Profiles of machines whose speeds are the same at all sizes, so that times have closed forms."""

from __future__ import annotations

from typing import Any

from trunkline.plan.hardware import Hardware, figure, points

KINDS = ("copy", "pointwise", "transcendental", "reduction")


def constant(device_type: str = "cuda", **changes: Any) -> Hardware:
    """Return a profile.

    Args:
        device_type: `cuda` or `cpu`, which has no link.
        changes: figures that replace others, or None to leave them out.
    """

    def one(value: float) -> dict[str, Any]:
        return figure(value, "made up", "2026")

    def attention(rate: float) -> dict[str, Any]:
        return {dtype: {"128": points([[1, 1, 0, rate], [1, 1, 1, rate]], "made up", "2026")} for dtype in dtypes}

    dtypes = changes.pop("dtypes", ("bf16", "fp32"))
    figures: dict[str, Any] = {
        "title": "made up",
        "device_type": device_type,
        "memory_bytes": one(2**36),
        "devices_per_node": one(4),
        "host_bandwidth": one(1e15),
        "link": {
            "to_device": one(20e9), "to_host": one(25e9), "both_to_device": one(10e9), "both_to_host": one(12e9),
            "devices_per_uplink": one(2),
        },
        "disk": {"read": one(4e9), "write": one(3e9), "both_read": one(2e9), "both_write": one(1e9)},
        "intra": {"bandwidth": one(1e11), "latency": one(1e-5)},
        "inter": {"bandwidth": one(1e10), "latency": one(1e-4)},
        "kernel_seconds": one(1e-15),
        "host_seconds": one(1e-15),
        "peak": {"bf16": one(4e14), "fp32": one(1e14)},
        "matmul": {dtype: points([[1, 1, 1, 1e13]], "made up", "2026") for dtype in ("bf16", "fp32")},
        "attention": {"default": "flash", "flash": {"forward": attention(2e14), "backward": attention(1.5e14)}},
        "memory": {kind: points([[1, 1e12]], "made up", "2026") for kind in KINDS},
    }  # fmt: skip
    if device_type == "cpu":
        del figures["link"]
    for name, value in changes.items():
        if value is None:
            del figures[name]
        else:
            figures[name] = one(value) if isinstance(value, float | int) else value
    return Hardware.from_figures(figures, name="made-up")
