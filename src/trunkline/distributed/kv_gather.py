"""Keys and values of which each rank holds a part, gathered while a kernel takes them; their gradients sent back.

What takes the place of ring attention here: it works for any number of heads, and is prefetched like any fetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trunkline.distributed.comm import Collectives, PendingTensor, cut_rows, join_rows


class Gather:
    """See `trunkline.attention.kv_gather.KeyValueGather`.

    Args:
        comm: of the ranks that hold parts.
    """

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.size, self.rank = comm.size, comm.rank

    def gather(self, k: Tensor, v: Tensor) -> _Coming:
        """See `KeyValueGather.gather`."""
        return _Coming(self.comm.all_gather(torch.cat([k.reshape(-1), v.reshape(-1)])), (k.shape, v.shape))

    def scatter(self, dk: Tensor, dv: Tensor) -> _Coming:
        """See `KeyValueGather.scatter`."""
        parts = torch.cat([cut_rows(dk, self.size), cut_rows(dv, self.size)], 1)
        shapes = [torch.Size((*x.shape[:2], x.shape[2] // self.size, x.shape[3])) for x in (dk, dv)]
        return _Coming(self.comm.reduce_scatter(parts), (shapes[0], shapes[1]))


@dataclass(frozen=True, slots=True)
class _Coming:
    """Two tensors side by side: a part of each rank (size, n), or this rank's own part (n,)."""

    pending: PendingTensor
    shapes: tuple[torch.Size, torch.Size]  # of a part

    def wait(self) -> tuple[Tensor, Tensor]:
        """See `PendingPair.wait`."""
        packed = self.pending.wait()
        parts = packed if packed.ndim == 2 else packed[None]
        columns = torch.split(parts, [shape.numel() for shape in self.shapes], 1)
        a, b = (join_rows(x, shape) for x, shape in zip(columns, self.shapes, strict=True))
        return a, b
