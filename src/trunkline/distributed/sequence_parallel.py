"""Division of a sequence over ranks: tokens, query rows and heads of each rank, and the exchanges between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from trunkline.attention.kv_gather import KeyValueGather, Pending
from trunkline.attention.online_softmax import merge_
from trunkline.chunking import Chunk, zigzag
from trunkline.distributed.comm import Collectives, join_rows, split_rows
from trunkline.distributed.interleave import Interleaver
from trunkline.distributed.mesh import ParallelDims
from trunkline.distributed.ulysses import Ulysses
from trunkline.engine.ranks import Ranks, T
from trunkline.offload.lanes.base import LaneTraffic


@dataclass(frozen=True, slots=True)
class MeshCoordinate:
    """Index of a rank along the axes that hold different tokens; tp ranks hold the same ones."""

    dp: int = 0
    cp: int = 0
    sp: int = 0


@dataclass(frozen=True, slots=True)
class SequenceComms:
    """Collectives of a rank's groups; None for a group of one rank."""

    sp: Collectives | None
    cp: Collectives | None
    sequence: Collectives | None  # cp and sp flattened


class SequenceParallelRanks(Ranks):
    """Ranks that divide a sequence over `cp` and `sp`; base of real (`MeshRanks`) and simulated ranks.

    Args:
        parallel_dims: degrees of the mesh.
        coordinate: this rank's place in it.
        comms: collectives of this rank's groups.
        traffic: counters that all of these share.
        device_type: `cpu` or `cuda`, for autocast.
    """

    def __init__(
        self,
        parallel_dims: ParallelDims,
        coordinate: MeshCoordinate,
        comms: SequenceComms,
        traffic: LaneTraffic,
        device_type: str,
    ) -> None:
        self.parallel_dims, self.coordinate, self.comms = parallel_dims, coordinate, comms
        self.traffic = traffic
        self.size = parallel_dims.sp * parallel_dims.cp
        # Each cp rank has two slices of a chunk (zigzag), and sp divides each of them again.
        self.chunk_multiple = (
            parallel_dims.sp if parallel_dims.cp == 1 else parallel_dims.cp * math.lcm(2, parallel_dims.sp)
        )
        self.seed_offset = (coordinate.dp * parallel_dims.cp + coordinate.cp) * parallel_dims.sp + coordinate.sp
        self.kv_gather: KeyValueGather | None = None if comms.cp is None else PackedKeyValueGather(comms.cp)
        self.name = f"cp{coordinate.cp}of{parallel_dims.cp}-sp{coordinate.sp}of{parallel_dims.sp}"
        self._interleaver = Interleaver(device_type)
        self._ulysses = None if comms.sp is None else Ulysses(comms.sp, self._interleaver)

    @property
    @override
    def replicated(self) -> ReplicatedRanks:
        return ReplicatedRanks(self)

    @override
    def local_tokens(self, chunk: Chunk) -> Chunk:
        here, dims = self.coordinate, self.parallel_dims
        return zigzag(chunk, here.cp, dims.cp, here.sp, dims.sp)

    @override
    def query_rows(self, chunk: Chunk) -> Chunk:
        cp = self.parallel_dims.cp
        return Chunk(chunk.index, chunk.start // cp, chunk.stop // cp)

    @override
    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tensors if self._ulysses is None else self._ulysses.to_heads(*tensors)

    @override
    def start_to_tokens(self, o: Tensor) -> Pending[tuple[Tensor, ...]] | None:
        return None if self._ulysses is None else self._ulysses.start_output(o)

    @override
    def to_tokens(self, o: Tensor, pending: Pending[tuple[Tensor, ...]] | None = None) -> Tensor:
        return o if self._ulysses is None else self._ulysses.to_tokens(o, pending)

    # Without sp nothing is exchanged in the middle of a layer: interleaved calls would only hold a second chunk.

    @override
    def interleave(self, calls: Iterable[Callable[[], None]]) -> None:
        if self._ulysses is None:
            super().interleave(calls)
        else:
            self._interleaver.interleave(calls)

    @override
    def pipeline(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        return super().pipeline(calls) if self._ulysses is None else self._interleaver.pipeline(calls)

    @override
    def local_heads(self, x: Tensor) -> Tensor:
        return x if self._ulysses is None else x[:, :1].expand(-1, self._ulysses.num_heads(x.shape[1]), -1, -1)

    @override
    def head_range(self, num_heads: int) -> slice:
        local = num_heads // self.parallel_dims.sp
        return slice(self.coordinate.sp * local, (self.coordinate.sp + 1) * local)

    @override
    def gather_tokens(self, x_BCE: Tensor) -> Tensor:
        if self.comms.sequence is None:
            return x_BCE
        parts = self.comms.sequence.all_gather(x_BCE.contiguous()).wait()
        sp, cp = self.parallel_dims.sp, self.parallel_dims.cp
        chunk = Chunk(0, 0, self.size * x_BCE.shape[1])
        out = x_BCE.new_empty(x_BCE.shape[0], len(chunk), *x_BCE.shape[2:])
        for rank, part in enumerate(parts):
            ranges = zigzag(chunk, rank // sp, cp, rank % sp, sp).ranges
            for (start, stop), piece in zip(ranges, part.split([b - a for a, b in ranges], 1), strict=True):
                out[:, start:stop] = piece
        return out

    @override
    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.comms.sequence is None else self.comms.sequence.all_reduce(x)

    # `merge_attention` is inherited: `kv_gather` has brought all keys to every rank.


class ReplicatedRanks(Ranks):
    """The ranks of a sequence while they decode: every rank computes all new tokens, attention alone is divided.

    A decoded token is too small to divide. So every rank runs the layers on all new tokens, and attends with its own
    heads (`sp`) to its own part of the cached keys (`cp`), which stay in place. The ranks exchange the outputs of the
    new tokens with their log-sum-exp, whatever the length of the context.

    Args:
        sharded: the same ranks for long inputs, which they divide.
    """

    def __init__(self, sharded: SequenceParallelRanks) -> None:
        self._sharded = sharded
        self.seed_offset = sharded.seed_offset
        self.traffic = sharded.traffic

    @override
    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        size, rank = self._sharded.parallel_dims.sp, self._sharded.coordinate.sp
        return tuple(heads_of_rank(x, rank, size) for x in tensors)

    @override
    def to_tokens(self, o: Tensor, pending: Pending[tuple[Tensor, ...]] | None = None) -> Tensor:
        comm = self._sharded.comms.sp
        return o if comm is None else torch.cat(list(comm.all_gather(o.contiguous()).wait()), dim=1)

    @override
    def local_heads(self, x: Tensor) -> Tensor:
        return self._sharded.local_heads(x)

    @override
    def head_range(self, num_heads: int) -> slice:
        return self._sharded.head_range(num_heads)

    @override
    def merge_attention(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        comm = self._sharded.comms.cp
        if comm is None:
            return o, lse
        packed = torch.cat([o.to(lse.dtype), lse[..., None]], -1).contiguous()
        # All ranks merge in rank order, so that they round alike. Rank 0 always has keys: its lse is finite. A rank
        # without keys (lse -inf) changes nothing.
        first, *others = comm.all_gather(packed).wait()
        o, lse = first[..., :-1].contiguous(), first[..., -1]
        for other in others:
            o, lse = merge_(o, lse, other[..., :-1], other[..., -1])
        return o, lse


def heads_of_rank(x: Tensor, rank: int, size: int) -> Tensor:
    """Return a rank's heads of (B, heads, T, D), repeated as in `Ulysses.to_heads` if `size` does not divide them."""
    copies = math.lcm(x.shape[1], size) // x.shape[1]
    x = x.repeat_interleave(copies, dim=1) if copies > 1 else x
    local = x.shape[1] // size
    return x[:, rank * local : (rank + 1) * local]


class PackedKeyValueGather(KeyValueGather):
    """Gather of keys and values over `cp`, both in one collective.

    It replaces ring attention: it works with any number of heads, and is prefetched like any other fetch.

    Args:
        comm: collectives of the `cp` group, whose ranks hold the parts.
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
    """Handle of keys and values packed in one tensor in flight: (size, n) if gathered, (n,) if scattered."""

    packed: Pending[Tensor]
    shapes: tuple[torch.Size, torch.Size]  # of one rank's keys, values

    @override
    def wait(self) -> tuple[Tensor, Tensor]:
        packed = self.packed.wait()
        parts = packed if packed.ndim == 2 else packed[None]
        columns = torch.split(parts, [shape.numel() for shape in self.shapes], 1)
        k, v = (join_rows(x, shape) for x, shape in zip(columns, self.shapes, strict=True))
        return k, v
