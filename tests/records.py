"""A step of which every figure is known, and a line of a run's metrics."""

from trunkline.report.timeline import Phase, Timeline
from trunkline.train.step_metrics import StepMetrics

GIB = 1024**3


def make_timeline(**changes):
    """A step of 10 s on 4 devices: busy 8 s, peak 60 GiB of 80, 40 % MFU, 50 % with recomputation."""
    fields = {
        "title": "Tiny, 1,000 tokens",
        "source": "measured",
        "seconds": 10.0,
        "phases": [Phase("forward", 0.0, 3.0), Phase("head", 3.0, 3.5), Phase("backward", 3.5, 10.0)],
        "memory": {"device": [(0.0, 20 * GIB), (4.0, 60 * GIB), (4.5, 25 * GIB)], "host": [(0.0, 0), (2.0, 100 * GIB)]},
        "capacity": {"device": 80 * GIB, "host": None},
        "holders": {
            "device": {"parameters": 16 * GIB, "keys and values": 32 * GIB},
            "host": {"layer inputs": 100 * GIB},
        },
        "lanes": {
            "compute": [(0.0, 3.0, "layer 0"), (4.0, 9.0, "layer 0 <again>")],
            "fetch": [(3.0, 4.0, "input 0"), (5.0, 5.5, "input 1")],
        },
        "exposed": {"fetch": 1.0},
        "moved": {"fetch": 3 * 10**9},
        "model_flops": 16 * 10**12,
        "hardware_flops": 20 * 10**12,
        "peak_flops": 1e12,
        "tokens": 1000,
        "devices": 4,
    }
    return Timeline(**{**fields, **changes})


def make_step(step, seconds=5.0, **changes):
    """A line of metrics.jsonl: 1,000 tokens, 8 TFLOPs."""
    fields = {
        "step": step,
        "loss": 3.0 / step,
        "grad_norm": 1.0,
        "lr": 1e-3,
        "tokens": 1000,
        "tokens_per_second": 1000 / seconds,
        "model_flops": 8 * 10**12,
        "flops_per_second": 8e12 / seconds,
        "peak_memory_bytes": 50 * GIB,
        "seconds": {"forward": seconds * 0.25, "backward": seconds * 0.75},
        "tiers": {"device": 40 * GIB, "host": 90 * GIB, "disk": 0},
        "lanes": {
            "fetch": {"bytes": 2_000_000_000, "gb_per_second": 4.0, "exposed_seconds": 0.5},
            "stash": {"bytes": 1_000_000_000, "gb_per_second": 4.0, "exposed_seconds": 0.0},
        },
    }
    return StepMetrics(**{**fields, **changes})
