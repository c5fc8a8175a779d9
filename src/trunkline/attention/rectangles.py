"""What a chunk of queries meets in one kernel call; and the same where each rank holds a part of the keys and values.

There, a span of a rank's own keys stands for the same span of every rank: all are brought together for the call, the
next on their way meanwhile, and the gradients of all are summed over ranks and cut again. The order of earlier keys
means nothing to attention. A chunk's own keys are put in their order, of which a rank has two slices
(`trunkline.chunking.zigzag`): the rows of each meet the slices before it, and of its own the causal half.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from trunkline.attention.pairs import Pair
from trunkline.chunking import Chunk, Meeting, zigzag_meetings
from trunkline.ranks import KeyValueGather, PendingPair

_Coming: TypeAlias = "tuple[Rectangle, PendingPair]"


@dataclass(frozen=True, slots=True)
class Rectangle:
    """Keys and values that a chunk of queries meets in one kernel call.

    Attributes:
        k: (B, K, T, D).
        v: the same.
        causal: whether the last of them are the rows' own.
        rows: which rows of the chunk meet them; None for all.
        span: their place in the buffers; None for a chunk that is streamed.
        streamed: that chunk.
        first: where they begin in what was gathered.
        length: keys that were gathered; 0 where nothing is.
        in_order: whether what was gathered has been put in the order of the sequence.
    """

    k: Tensor
    v: Tensor
    causal: bool
    rows: slice | None = None
    span: tuple[int, int] | None = None
    streamed: Chunk | None = None
    first: int = 0
    length: int = 0
    in_order: bool = False

    def take(self, x: Tensor) -> Tensor:
        """Its rows of something (B, heads, C, …)."""
        return x if self.rows is None else x[:, :, self.rows]


class Gathered:
    """The rectangles of all ranks' keys, from those of this rank's own; the next is on its way when one is given.

    Args:
        gather: brings them together.
        bottom_right: whether a causal kernel call may have more keys than queries.
    """

    def __init__(self, gather: KeyValueGather, *, bottom_right: bool) -> None:
        self._gather = gather
        self._bottom_right = bottom_right
        self._begun: tuple[Iterator[Rectangle], _Coming | None] | None = None  # of the chunk that follows

    def of_chunk(
        self,
        chunk: Chunk,
        own: Rectangle,
        earlier: Callable[[Chunk], Iterator[Rectangle]],
        following: Chunk | None,
    ) -> Iterator[Rectangle]:
        """Those of one chunk of queries.

        Args:
            chunk: which.
            own: this rank's, of the chunk's own keys.
            earlier: gives this rank's of the keys before a chunk.
            following: the chunk that this will be called for next, whose first is sent for beforehand.
        """
        rest, coming = (earlier(chunk), None) if self._begun is None else self._begun
        self._begun = None  # every piece is let go with its call
        for met in itertools.chain(rest, [own]):
            ahead = self._send_for(met)
            if coming is not None:
                yield from self._cut(coming)
            coming = ahead
        if following is not None:
            rest = earlier(following)
            first = next(rest, None)
            self._begun = rest, None if first is None else self._send_for(first)
        assert coming is not None
        yield from self._cut(coming)

    def _send_for(self, met: Rectangle) -> _Coming:
        return met, self._gather.gather(met.k, met.v)

    def _cut(self, coming: _Coming) -> Iterator[Rectangle]:
        met, pair = coming
        k, v = pair.wait()
        length = k.shape[2]
        if not met.causal:
            yield replace(met, k=k, v=v, length=length)
            return
        k, v = (_in_order(x, self._gather.size) for x in (k, v))
        meetings = zigzag_meetings(met.k.shape[2], self._gather.rank, self._gather.size)
        for rows, keys, causal in _joined(meetings) if self._bottom_right else meetings:
            yield replace(met, k=k[:, :, keys], v=v[:, :, keys], causal=causal, rows=rows, first=keys.start,
                          length=length, in_order=True)  # fmt: skip


def _in_order(x: Tensor, size: int) -> Tensor:
    """Keys (B, K, T, D), rank by rank, each rank's two slices, in the order of the sequence."""
    first, last = x.reshape(*x.shape[:2], size, 2, -1, x.shape[3]).unbind(3)  # (B, K, size, slice, D) each
    return torch.cat([first, last.flip(2)], 2).flatten(2, 3)


def _by_ranks(x: Tensor, size: int) -> Tensor:
    """The other way."""
    first, last = x.reshape(*x.shape[:2], 2, size, -1, x.shape[3]).unbind(2)
    return torch.stack([first, last.flip(2)], 3).flatten(2, 4)


def _joined(meetings: list[Meeting]) -> list[Meeting]:
    """One call for all that the same rows meet, where a causal call may have more keys than rows."""
    return [Meeting(rows, slice(0, keys.stop), causal) for rows, keys, causal in meetings if causal]


class Returns:
    """Gradients of gathered keys and values on their way back, while the next are computed.

    Args:
        gather: what brought them together.
        dtype: of the sums over ranks.
    """

    def __init__(self, gather: KeyValueGather, dtype: torch.dtype) -> None:
        self._gather = gather
        self._dtype = dtype
        self._met: Rectangle | None = None
        self._sums: Pair | None = None
        self._coming: _Coming | None = None

    def add(self, met: Rectangle, pair: Pair) -> Iterator[tuple[Rectangle, Pair]]:
        """Take those of a rectangle; gives what has come back, for the rank's own keys."""
        if self._met is not None and (met.span, met.streamed) != (self._met.span, self._met.streamed):
            yield from self._send()
        self._met = met
        stop = met.first + met.k.shape[2]
        if self._sums is None and stop - met.first == met.length:
            self._sums = pair[0].to(self._dtype), pair[1].to(self._dtype)
            return
        if self._sums is None:
            a, b = (x.new_zeros(*x.shape[:2], met.length, x.shape[3], dtype=self._dtype) for x in pair)
            self._sums = a, b
        for total, x in zip(self._sums, pair, strict=True):
            total[:, :, met.first : stop] += x

    def rest(self) -> Iterator[tuple[Rectangle, Pair]]:
        """All that is still on its way."""
        yield from self._send()
        yield from self._arrived()

    def _send(self) -> Iterator[tuple[Rectangle, Pair]]:
        yield from self._arrived()
        assert self._met is not None
        assert self._sums is not None
        if self._met.in_order:
            self._sums = _by_ranks(self._sums[0], self._gather.size), _by_ranks(self._sums[1], self._gather.size)
        self._coming = self._met, self._gather.scatter(*self._sums)
        self._met = self._sums = None

    def _arrived(self) -> Iterator[tuple[Rectangle, Pair]]:
        if self._coming is not None:
            met, pair = self._coming
            self._coming = None
            yield met, pair.wait()
