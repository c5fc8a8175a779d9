"""Metrics of a step."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepMetrics:
    """Metrics of one optimizer step. The fields are the keys of a line of `metrics.jsonl`.

    Loss, norm, tokens and FLOPs are all ranks'; memory, seconds and lanes are this rank's.

    Attributes:
        step: number of the step, counted from 1.
        loss: mean over all valid tokens of the step (all micro-batches), in nats a token.
        grad_norm: global norm before clipping.
        lr: learning rate.
        tokens: tokens of the step.
        tokens_per_second: tokens divided by the seconds of all parts.
        model_flops: FLOPs of the step, causal attention exact, recomputation not counted; None if not countable.
        flops_per_second: `model_flops` divided by the seconds of all parts.
        peak_memory_bytes: CUDA: most memory allocated in the step; CPU: most resident memory of the process so far.
        seconds: seconds of each part: data, embed, forward, head, backward, optimizer.
        tiers: most bytes that the engine held in each tier: device, host, disk.
        lanes: for fetch, stash, and over ranks comm: `bytes` moved, `gb_per_second` (10^9 bytes) while the lane worked,
            and `exposed_seconds` that compute waited for it.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_second: float
    model_flops: int | None
    flops_per_second: float | None
    peak_memory_bytes: int
    seconds: dict[str, float]
    tiers: dict[str, int]
    lanes: dict[str, dict[str, float]]

    @property
    def bytes_moved(self) -> int:
        """Bytes moved over all lanes of this rank."""
        return int(sum(lane["bytes"] for lane in self.lanes.values()))

    @property
    def exposed_share(self) -> float:
        """Share of the step in which compute waited for lanes."""
        return sum(lane["exposed_seconds"] for lane in self.lanes.values()) / self.total_seconds

    @property
    def total_seconds(self) -> float:
        """Seconds of the whole step."""
        return sum(self.seconds.values())


def peak_memory_bytes(device: torch.device) -> int:
    """Return this process's peak bytes: on CUDA allocated since the last reset, on a CPU resident so far."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Linux counts KiB, macOS bytes.
    return peak if sys.platform == "darwin" else peak * 1024
