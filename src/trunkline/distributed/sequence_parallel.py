"""How ranks share a sequence: which tokens, rows and heads are whose, and how they are exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from trunkline.attention.kv_gather import KeyValueGather
from trunkline.chunking import Chunk, zigzag
from trunkline.distributed.comm import Collectives
from trunkline.distributed.interleave import Interleaver
from trunkline.distributed.kv_gather import Gather
from trunkline.distributed.mesh import ParallelDims
from trunkline.distributed.replicated import ReplicatedRanks
from trunkline.distributed.ulysses import Ulysses
from trunkline.engine.ranks import PendingTensors, SingleRank, T
from trunkline.offload.lanes.base import LaneTraffic


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank is on the axes of a mesh."""

    dp: int = 0
    cp: int = 0
    sp: int = 0


@dataclass(frozen=True, slots=True)
class Groups:
    """Collectives of the groups that a rank is in; None where it is alone."""

    sp: Collectives | None
    cp: Collectives | None
    sequence: Collectives | None  # cp and sp together


class SharedSequence:
    """The part of `trunkline.engine.ranks.Ranks` that is about cutting and exchanging.

    Args:
        degrees: of the mesh.
        place: of this rank.
        groups: that it exchanges with.
        traffic: of these.
        device_type: on which the ranks compute.
    """

    def __init__(
        self, parallel_dims: ParallelDims, place: Place, groups: Groups, traffic: LaneTraffic, device_type: str
    ) -> None:
        self.parallel_dims, self.place, self.groups = parallel_dims, place, groups
        self.traffic = traffic
        self.size = parallel_dims.sp * parallel_dims.cp
        # Rows over cp are cut in two slices a rank, which sp cuts again.
        self.granule = parallel_dims.sp if parallel_dims.cp == 1 else parallel_dims.cp * math.lcm(2, parallel_dims.sp)
        self._sp, self._cp, self._dp = place.sp, place.cp, place.dp
        self._turns = Interleaver(device_type)
        self._order: SingleRank | Interleaver = self._turns if parallel_dims.sp > 1 else SingleRank()
        self._ulysses = None if groups.sp is None else Ulysses(groups.sp, self._turns)
        self.gather: KeyValueGather | None = None if groups.cp is None else Gather(groups.cp)
        self._sequence = groups.sequence

    @property
    def salt(self) -> int:
        """See `Ranks.salt`."""
        return (self._dp * self.parallel_dims.cp + self._cp) * self.parallel_dims.sp + self._sp

    @property
    def name(self) -> str:
        """See `Ranks.name`."""
        place, parallel_dims = self.place, self.parallel_dims
        return f"cp{place.cp}of{parallel_dims.cp}-sp{place.sp}of{parallel_dims.sp}"

    @property
    def together(self) -> ReplicatedRanks:
        """See `Ranks.together`."""
        return ReplicatedRanks(self)

    def own(self, chunk: Chunk) -> Chunk:
        """See `Ranks.own`."""
        return zigzag(chunk, self._cp, self.parallel_dims.cp, self._sp, self.parallel_dims.sp)

    def rows(self, chunk: Chunk) -> Chunk:
        """See `Ranks.rows`."""
        return Chunk(chunk.index, chunk.start // self.parallel_dims.cp, chunk.stop // self.parallel_dims.cp)

    def to_heads(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """See `Ranks.to_heads`."""
        return tensors if self._ulysses is None else self._ulysses.to_heads(*tensors)

    def start_to_tokens(self, o: Tensor) -> PendingTensors | None:
        """See `Ranks.start_to_tokens`."""
        return None if self._ulysses is None else self._ulysses.start_output(o)

    def to_tokens(self, o: Tensor, coming: PendingTensors | None = None) -> Tensor:
        """See `Ranks.to_tokens`."""
        return o if self._ulysses is None else self._ulysses.to_tokens(o, coming)

    def side_by_side(self, calls: Iterable[Callable[[], None]]) -> None:
        """See `Ranks.side_by_side`."""
        self._order.side_by_side(calls)

    def ahead(self, calls: Iterable[Callable[[], T]]) -> Iterator[T]:
        """See `Ranks.ahead`."""
        return self._order.ahead(calls)

    def own_heads(self, x: Tensor) -> Tensor:
        """See `Ranks.own_heads`."""
        if self._ulysses is None:
            return x
        own = self._ulysses.num_heads(x.shape[1])
        return x[:, :1].expand(-1, own, -1, -1)

    def head_range(self, num_heads: int) -> slice:
        """See `Ranks.head_range`."""
        own = num_heads // self.parallel_dims.sp
        return slice(self._sp * own, (self._sp + 1) * own)

    def whole(self, x_BCE: Tensor) -> Tensor:
        """See `Ranks.whole`."""
        if self._sequence is None:
            return x_BCE
        parts = self._sequence.all_gather(x_BCE.contiguous()).wait()
        sp, cp = self.parallel_dims.sp, self.parallel_dims.cp
        chunk = Chunk(0, 0, self.size * x_BCE.shape[1])
        out = x_BCE.new_empty(x_BCE.shape[0], len(chunk), *x_BCE.shape[2:])
        for rank, part in enumerate(parts):
            ranges = zigzag(chunk, rank // sp, cp, rank % sp, sp).ranges
            for (start, stop), piece in zip(ranges, part.split([b - a for a, b in ranges], 1), strict=True):
                out[:, start:stop] = piece
        return out

    def total(self, x: Tensor) -> Tensor:
        """See `Ranks.total`."""
        return x if self._sequence is None else self._sequence.all_reduce(x)

    def merged(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """See `Ranks.merged`: here every rank has gathered all keys."""
        return o, lse
