"""How far a step is, from where its sweeps are: what an ETA needs when one step takes minutes.

Work inside a part is not even: with causal attention chunk i of n costs in proportion to 2i+1, and a backward sweep
goes from the dear end. The shares of the parts are taken from the step before; for the first step they are guessed from
the ratio of work (a backward sweep costs about 2.5 forward ones).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

_SWEEPS = ("embed", "forward", "head", "backward")
_FIRST_SHARES = {"embed": 0.01, "forward": 0.27, "head": 0.04, "backward": 0.68}


class SweepPosition(Protocol):
    """Where a sweep is; `trunkline.Progress` is one."""

    @property
    def part(self) -> str:
        """One of embed, forward, head, backward."""

    @property
    def layer(self) -> int:
        """Layer from 0; -1 for the embedding."""

    @property
    def num_layers(self) -> int:
        """Layers of the model."""

    @property
    def chunk(self) -> int:
        """Chunk whose work begins."""

    @property
    def num_chunks(self) -> int:
        """Chunks of the sequence, or tiles of the head."""


class StepProgress:
    """Share of a step that is done, between 0 and 1, never falling within a step.

    Args:
        num_micro_batches: Forward and backward passes of a step.
        attention_share: Share of the step's FLOPs that is attention; that part of a sweep is quadratic.
    """

    def __init__(self, num_micro_batches: int, attention_share: float) -> None:
        self._num_micro_batches = num_micro_batches
        self._attention_share = attention_share
        self._shares = dict(_FIRST_SHARES)
        self.micro_batch = 0
        self.fraction = 0.0

    def start_step(self, last_seconds: Mapping[str, float] | None) -> None:
        """Begin a step.

        Args:
            last_seconds: Seconds of the parts of the step before, None for the first.
        """
        self.fraction = 0.0
        if last_seconds is not None:
            total = sum(last_seconds[part] for part in _SWEEPS)
            self._shares = {part: last_seconds[part] / total for part in _SWEEPS}

    def update(self, position: SweepPosition) -> None:
        """Take note of where the sweep is now."""
        done = 0.0
        for part in _SWEEPS:
            if part == position.part:
                break
            done += self._shares[part]
        done += self._shares[position.part] * self._within(position)
        self.fraction = max(self.fraction, min(1.0, (self.micro_batch + done) / self._num_micro_batches))

    def _within(self, position: SweepPosition) -> float:
        if position.part not in ("forward", "backward"):
            return position.chunk / position.num_chunks
        if position.part == "forward":
            return (position.layer + self._cost(position.chunk / position.num_chunks)) / position.num_layers
        if position.layer < 0:
            return 1.0
        layers_done = position.num_layers - 1 - position.layer
        return (layers_done + 1 - self._cost((position.chunk + 1) / position.num_chunks)) / position.num_layers

    def _cost(self, share: float) -> float:
        """Cost of the first `share` of a sequence, as a share of the cost of all of it."""
        return self._attention_share * share**2 + (1 - self._attention_share) * share
