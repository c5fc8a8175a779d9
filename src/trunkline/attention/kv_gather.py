"""Interface by which attention gathers keys and values that are sharded over ranks."""

from __future__ import annotations

from typing import Protocol, TypeVar

from torch import Tensor

Result = TypeVar("Result", covariant=True)


class Pending(Protocol[Result]):
    """Result of an asynchronous collective."""

    def wait(self) -> Result:
        """Return the result, ready for compute on the current stream."""
        ...


class KeyValueGather(Protocol):
    """All-gather of keys and values along the sequence, and reduce-scatter of their gradients.

    Attributes:
        size: number of ranks that the query rows of a chunk, and their keys, are cut over (`cp`).
        rank: index of this rank among them.
    """

    size: int
    rank: int

    def gather(self, k: Tensor, v: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Start to gather keys and values (B, K, T, D) of all ranks, in rank order: two (B, K, size * T, D)."""
        ...

    def scatter(self, dk: Tensor, dv: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Start to sum gradients (B, K, size * T, D) over ranks, in their dtype; each rank gets its (B, K, T, D)."""
        ...
