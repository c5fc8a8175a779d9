"""All-gather of keys and values over `cp`, and reduce-scatter of their gradients.

It replaces ring attention: it works with any number of heads, and is prefetched like any other fetch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kv_gather import KeyValueGather, Pending
from trunkline.distributed.comm import Collectives, join_rows, split_rows


class PackedKeyValueGather(KeyValueGather):
    """Gather of keys and values in one collective.

    Args:
        comm: collectives of the ranks that hold parts.
    """

    def __init__(self, comm: Collectives) -> None:
        self.comm = comm
        self.size, self.rank = comm.size, comm.rank

    @override
    def gather(self, k: Tensor, v: Tensor) -> PendingKeyValue:
        packed = torch.cat([k.reshape(-1), v.reshape(-1)])
        return PendingKeyValue(self.comm.all_gather(packed), (k.shape, v.shape))

    @override
    def scatter(self, dk: Tensor, dv: Tensor) -> PendingKeyValue:
        packed = torch.cat([split_rows(dk, self.size), split_rows(dv, self.size)], 1)
        shapes = [torch.Size((*x.shape[:2], x.shape[2] // self.size, x.shape[3])) for x in (dk, dv)]
        return PendingKeyValue(self.comm.reduce_scatter(packed), (shapes[0], shapes[1]))


@dataclass(frozen=True, slots=True)
class PendingKeyValue(Pending[tuple[Tensor, Tensor]]):
    """Keys and values packed in one tensor on its way: (size, n) if gathered, (n,) if scattered."""

    packed: Pending[Tensor]
    shapes: tuple[torch.Size, torch.Size]  # of one rank's keys, values

    @override
    def wait(self) -> tuple[Tensor, Tensor]:
        packed = self.packed.wait()
        parts = packed if packed.ndim == 2 else packed[None]
        columns = torch.split(parts, [shape.numel() for shape in self.shapes], 1)
        k, v = (join_rows(x, shape) for x, shape in zip(columns, self.shapes, strict=True))
        return k, v
