"""The interface by which attention gathers keys and values that ranks hold in parts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class KeyValueGather(Protocol):
    """Keys and values that ranks hold in parts, brought together while they are needed."""

    size: int
    rank: int

    def gather(self, k: Tensor, v: Tensor) -> PendingPair:
        """Those of all ranks, one rank's after another's: two (B, K, T, D) to two (B, K, size * T, D)."""
        ...

    def scatter(self, dk: Tensor, dv: Tensor) -> PendingPair:
        """Sums over ranks of gradients of what `gather` gave, each rank its own part, in their dtype."""
        ...


class PendingPair(Protocol):
    """Two tensors on their way."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """Them, once compute may use them."""
        ...
