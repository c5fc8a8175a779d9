"""How ranks share a sequence: which tokens, rows and heads are whose, and how they are exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from trunkline.chunking import Chunk, zigzag
from trunkline.lanes import Traffic
from trunkline.parallel.comm import Collectives
from trunkline.parallel.gather import Gather
from trunkline.parallel.mesh import Degrees
from trunkline.parallel.together import Together
from trunkline.parallel.turns import Turns
from trunkline.parallel.ulysses import Ulysses
from trunkline.ranks import Alone, KeyValueGather, PendingTensors, T


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
    """The part of `trunkline.ranks.Ranks` that is about cutting and exchanging.

    Args:
        degrees: of the mesh.
        place: of this rank.
        groups: that it exchanges with.
        traffic: of these.
        device_type: on which the ranks compute.
    """

    def __init__(self, degrees: Degrees, place: Place, groups: Groups, traffic: Traffic, device_type: str) -> None:
        self.degrees, self.place, self.groups = degrees, place, groups
        self.traffic = traffic
        self.size = degrees.sp * degrees.cp
        # Rows over cp are cut in two slices a rank, which sp cuts again.
        self.granule = degrees.sp if degrees.cp == 1 else degrees.cp * math.lcm(2, degrees.sp)
        self._sp, self._cp, self._dp = place.sp, place.cp, place.dp
        self._turns = Turns(device_type)
        self._order: Alone | Turns = self._turns if degrees.sp > 1 else Alone()
        self._ulysses = None if groups.sp is None else Ulysses(groups.sp, self._turns)
        self.gather: KeyValueGather | None = None if groups.cp is None else Gather(groups.cp)
        self._sequence = groups.sequence

    @property
    def salt(self) -> int:
        """See `Ranks.salt`."""
        return (self._dp * self.degrees.cp + self._cp) * self.degrees.sp + self._sp

    @property
    def name(self) -> str:
        """See `Ranks.name`."""
        place, degrees = self.place, self.degrees
        return f"cp{place.cp}of{degrees.cp}-sp{place.sp}of{degrees.sp}"

    @property
    def together(self) -> Together:
        """See `Ranks.together`."""
        return Together(self)

    def own(self, chunk: Chunk) -> Chunk:
        """See `Ranks.own`."""
        return zigzag(chunk, self._cp, self.degrees.cp, self._sp, self.degrees.sp)

    def rows(self, chunk: Chunk) -> Chunk:
        """See `Ranks.rows`."""
        return Chunk(chunk.index, chunk.start // self.degrees.cp, chunk.stop // self.degrees.cp)

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
        own = num_heads // self.degrees.sp
        return slice(self._sp * own, (self._sp + 1) * own)

    def whole(self, x_BCE: Tensor) -> Tensor:
        """See `Ranks.whole`."""
        if self._sequence is None:
            return x_BCE
        parts = self._sequence.all_gather(x_BCE.contiguous()).wait()
        sp, cp = self.degrees.sp, self.degrees.cp
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
