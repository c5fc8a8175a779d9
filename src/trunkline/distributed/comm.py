"""Asynchronous collectives of one group of ranks, with counters."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kv_gather import Pending
from trunkline.offload.lanes.base import LaneTraffic

# PyTorch 2.13 renamed these; it warns under the old names.
_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

CollectiveKind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]


def gather_small(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Gather a small tensor (n,) from every rank of a group (None for all ranks of the job): (ranks, n).

    All ranks of the group call it, with tensors of one size and dtype on the group's kind of device.
    """
    out = x.new_empty(dist.get_world_size(group) * len(x))
    _all_gather(out, x, group=group)
    return out.view(-1, len(x))


def split_rows(x: Tensor, size: int) -> Tensor:
    """Split (B, heads, size * T, D) along the rows into one flat part per rank: (size, n)."""
    batch, heads, length, dim = x.shape
    return x.reshape(batch, heads, size, length // size, dim).permute(2, 0, 1, 3, 4).reshape(size, -1)


def join_rows(parts: Tensor, shape: Sequence[int]) -> Tensor:
    """Join flat parts (size, n), one (B, heads, T, D) per rank, into (B, heads, size * T, D)."""
    size, (batch, heads, length, dim) = len(parts), shape
    return parts.reshape(size, *shape).permute(1, 2, 0, 3, 4).reshape(batch, heads, size * length, dim)


class Collectives(ABC):
    """Collectives of a group of ranks, real or simulated. All ranks of the group call them in the same order.

    They are not differentiable, and sum in the dtype of their argument.

    Args:
        size: number of ranks in the group.
        rank: index of this rank in the group.
        traffic: counters; every collective adds the bytes that this rank sends.
    """

    def __init__(self, size: int, rank: int, traffic: LaneTraffic) -> None:
        self.size, self.rank, self.traffic = size, rank, traffic

    def all_to_all(self, parts: Tensor) -> Pending[Tensor]:
        """Start to send one part of (size, n) to each rank; the result is one part from each rank, (size, n)."""
        return self._send("all_to_all", parts.new_empty(parts.shape), parts, self._others_part(parts))

    def all_gather(self, part: Tensor) -> Pending[Tensor]:
        """Start to gather a part of any shape from every rank; the result is (size, *shape)."""
        return self._send("all_gather", part.new_empty(self.size, *part.shape), part, part.nbytes * (self.size - 1))

    def reduce_scatter(self, parts: Tensor) -> Pending[Tensor]:
        """Start to sum parts (size, n) over the group; the result is this rank's part of the sum, (n,)."""
        return self._send("reduce_scatter", parts.new_empty(parts.shape[1:]), parts, self._others_part(parts))

    def all_reduce(self, x: Tensor) -> Tensor:
        """Wait for the sum over the group, and return it as a new tensor."""
        out = x.clone()
        return self._send("all_reduce", out, out, 2 * x.nbytes * (self.size - 1) // self.size).wait()

    def _others_part(self, parts: Tensor) -> int:
        return parts.nbytes * (self.size - 1) // self.size

    def _send(self, kind: CollectiveKind, out: Tensor, sent: Tensor, nbytes: int) -> Pending[Tensor]:
        self.traffic.moved += nbytes
        return self._start(kind, out, sent, nbytes)

    @abstractmethod
    def _start(self, kind: CollectiveKind, out: Tensor, sent: Tensor, nbytes: int) -> Pending[Tensor]:
        """Start a collective that reads `sent` and writes `out`; this rank sends `nbytes`."""


@dataclass(slots=True)
class PendingCollective(Pending[Tensor]):
    """Collective in flight; its first `wait` counts the seconds."""

    tensor: Tensor
    work: dist.Work | None
    sent: Tensor | None  # must outlive the collective, which reads it on another stream or thread
    traffic: LaneTraffic
    start: float

    @override
    def wait(self) -> Tensor:
        if self.work is not None:
            before = time.perf_counter()
            # On CUDA this makes the current stream wait, not the host.
            self.work.wait()
            now = time.perf_counter()
            self.traffic.exposed += now - before
            self.traffic.busy += now - self.start
            self.work = self.sent = None
        return self.tensor


class Comm(Collectives):
    """Collectives of a process group.

    Args:
        group: process group of torch.distributed.
        traffic: counters of bytes that this rank sends, of seconds from a collective's start to its result (`busy`),
            and of seconds that the host waited (`exposed`; not the seconds that a CUDA stream waited).
    """

    def __init__(self, group: dist.ProcessGroup, traffic: LaneTraffic) -> None:
        super().__init__(dist.get_world_size(group), dist.get_rank(group), traffic)
        self.group = group

    @override
    def _start(self, kind: CollectiveKind, out: Tensor, sent: Tensor, nbytes: int) -> PendingCollective:
        start = time.perf_counter()
        flat = sent.reshape(-1)  # a copy if `sent` is not contiguous, which must outlive the collective as well
        if kind == "all_to_all":
            work = dist.all_to_all_single(out, sent, group=self.group, async_op=True)
        elif kind == "all_gather":
            work = _all_gather(out.view(-1), flat, group=self.group, async_op=True)
        elif kind == "reduce_scatter":
            work = _reduce_scatter(out, flat, group=self.group, async_op=True)
        else:
            work = dist.all_reduce(out, group=self.group, async_op=True)
        return PendingCollective(out, work, flat, self.traffic, start)
