"""Keys and values of which each rank holds a part, gathered while a kernel takes them; their gradients sent back.

What takes the place of ring attention here: it works for any number of heads, and is prefetched like any fetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline.parallel.comm import Comm, Pending


class Gather:
    """See `trunkline.ranks.KeyValueGather`.

    Args:
        comm: of the ranks that hold parts.
    """

    def __init__(self, comm: Comm) -> None:
        self.comm = comm
        self.size, self.rank = comm.size, comm.rank

    def gather(self, k: Tensor, v: Tensor) -> _Whole:
        """See `KeyValueGather.gather`."""
        packed = torch.cat([k.reshape(-1), v.reshape(-1)])
        return _Whole(self.comm.all_gather(packed), (k.shape, v.shape))

    def scatter(self, dk: Tensor, dv: Tensor) -> _Part:
        """See `KeyValueGather.scatter`."""
        parts, shapes = [], []
        for x in (dk, dv):
            batch, heads, length, dim = x.shape
            part = (batch, heads, length // self.size, dim)
            parts.append(x.reshape(batch, heads, self.size, *part[2:]).permute(2, 0, 1, 3, 4).reshape(self.size, -1))
            shapes.append(torch.Size(part))
        return _Part(self.comm.reduce_scatter(torch.cat(parts, 1)), (shapes[0], shapes[1]))


@dataclass(frozen=True, slots=True)
class _Whole:
    pending: Pending
    shapes: tuple[torch.Size, torch.Size]

    def wait(self) -> tuple[Tensor, Tensor]:
        """See `PendingPair.wait`."""
        parts = self.pending.wait()
        size = len(parts)
        k, v = (
            x.reshape(size, *shape).permute(1, 2, 0, 3, 4).reshape(*shape[:2], size * shape[2], shape[3])
            for x, shape in zip(
                torch.split(parts, [shape.numel() for shape in self.shapes], 1), self.shapes, strict=True
            )
        )
        return k, v


@dataclass(frozen=True, slots=True)
class _Part:
    pending: Pending
    shapes: tuple[torch.Size, torch.Size]

    def wait(self) -> tuple[Tensor, Tensor]:
        """See `PendingPair.wait`."""
        part = self.pending.wait()
        dk, dv = (
            x.reshape(shape)
            for x, shape in zip(torch.split(part, [shape.numel() for shape in self.shapes]), self.shapes, strict=True)
        )
        return dk, dv
