"""Collectives on a lane: given off at once, waited for where their result is needed, and metered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from trunkline.offload.lanes.base import LaneTraffic

# From PyTorch 2.13 on under names of their own, with a warning under the old ones.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def from_everyone(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """The same small tensor (n,) of every rank of a group, None for all, (ranks, n)."""
    out = x.new_empty(dist.get_world_size(group) * len(x))
    _all_gather(out, x, group=group)
    return out.view(-1, len(x))


def cut_rows(x: Tensor, size: int) -> Tensor:
    """The rows of (B, heads, size * T, D) in equal parts, one a rank, (size, n)."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, heads, size, length // size, dim).permute(2, 0, 1, 3, 4).reshape(size, -1)


def join_rows(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """One part of each rank (size, n), each of shape (B, heads, T, D), as (B, heads, size * T, D)."""
    size, (batch, heads, length, dim) = len(parts), shape
    return parts.reshape(size, *shape).permute(1, 2, 0, 3, 4).reshape(batch, heads, size * length, dim)


@dataclass(slots=True)
class Pending:
    """A tensor on its way; see `wait`."""

    tensor: Tensor
    work: dist.Work | None
    sent: Tensor | None  # in use until then
    traffic: LaneTraffic
    start: float

    def wait(self) -> Tensor:
        """It, once compute may use it."""
        if self.work is not None:
            before = time.perf_counter()
            self.work.wait()
            now = time.perf_counter()
            self.traffic.exposed += now - before
            self.traffic.busy += now - self.start
            self.work = self.sent = None
        return self.tensor


class Collectives(Protocol):
    """What a group of ranks does together; every call gives a tensor on its way.

    Attributes:
        size: ranks of the group.
        rank: this one's place in it.
    """

    size: int
    rank: int

    def all_to_all(self, parts: Tensor) -> PendingTensor:
        """One part (size, n) to each rank; gives one part of each rank (size, n)."""
        ...

    def all_gather(self, part: Tensor) -> PendingTensor:
        """This rank's part (n,); gives those of all (size, n)."""
        ...

    def reduce_scatter(self, parts: Tensor) -> PendingTensor:
        """Parts (size, n) to be summed over ranks; gives this rank's part (n,)."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum over ranks, a new tensor."""
        ...


class PendingTensor(Protocol):
    """A tensor on its way."""

    def wait(self) -> Tensor:
        """It, once compute may use it."""
        ...


class Comm:
    """Collectives of one group of ranks.

    Args:
        group: of torch.distributed.
        traffic: receives the bytes that this rank sends, the seconds from giving a collective off to having its result
            (`busy`), and those that compute waited (`exposed`; on CUDA it is the stream that waits, which is not seen).
    """

    def __init__(self, group: dist.ProcessGroup, traffic: LaneTraffic) -> None:
        self.group = group
        self.size = dist.get_world_size(group)
        self.rank = dist.get_rank(group)
        self.traffic = traffic

    def all_to_all(self, parts: Tensor) -> Pending:
        """See `Collectives.all_to_all`."""
        out = parts.new_empty(parts.shape)
        start = self._count(parts.nbytes * (self.size - 1) // self.size)
        return self._pending(out, dist.all_to_all_single(out, parts, group=self.group, async_op=True), parts, start)

    def all_gather(self, part: Tensor) -> Pending:
        """See `Collectives.all_gather`."""
        out = part.new_empty(self.size, *part.shape)
        start = self._count(part.nbytes * (self.size - 1))
        part = part.reshape(-1)
        return self._pending(out, _all_gather(out.view(-1), part, group=self.group, async_op=True), part, start)

    def reduce_scatter(self, parts: Tensor) -> Pending:
        """See `Collectives.reduce_scatter`."""
        out = parts.new_empty(parts.shape[1:])
        start = self._count(parts.nbytes * (self.size - 1) // self.size)
        work = _reduce_scatter(out, parts.reshape(-1), group=self.group, async_op=True)
        return self._pending(out, work, parts, start)

    def all_reduce(self, x: Tensor) -> Tensor:
        """See `Collectives.all_reduce`."""
        out = x.clone()
        start = self._count(2 * x.nbytes * (self.size - 1) // self.size)
        work = dist.all_reduce(out, group=self.group, async_op=True)
        return self._pending(out, work, out, start).wait()

    def _count(self, nbytes: int) -> float:
        self.traffic.moved += nbytes
        return time.perf_counter()

    def _pending(self, out: Tensor, work: dist.Work | None, sent: Tensor, start: float) -> Pending:
        return Pending(out, work, sent, self.traffic, start)
