"""The keys and values that a chunk of queries meets, piece by piece; and the same where each rank holds a part of them.

There, a piece of a rank's own keys stands for the same piece of every rank: all are brought together, the next on
their way meanwhile, and the gradients of all are summed over ranks and cut again. Where all rows see all of a piece the
order of its keys means nothing; else it is one chunk, of which a rank has two slices (`trunkline.chunking.zigzag`), and
these are put in the order of the sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch import Tensor

from trunkline.attention.pairs import Pair
from trunkline.attention.visibility import Range
from trunkline.chunking import Chunk
from trunkline.ranks import KeyValueGather, PendingPair

_Coming: TypeAlias = "tuple[Piece, PendingPair]"


@dataclass(frozen=True, slots=True)
class Piece:
    """Keys and values that a chunk of queries meets together.

    Attributes:
        k: (B, K, T, D).
        v: the same.
        first: place in the sequence of the first of them; None where all rows see all of them.
        span: their place in this rank's buffers; None for a chunk that is streamed.
        streamed: that chunk.
    """

    k: Tensor
    v: Tensor
    first: int | None
    span: Range | None = None
    streamed: Chunk | None = None


class Gathered:
    """The pieces of all ranks' keys, from those of this rank's own; the next is on its way when one is given.

    Args:
        gather: brings them together.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._begun: tuple[Iterator[Piece], _Coming | None] | None = None  # of the chunk that follows

    def of_chunk(
        self, chunk: Chunk, own: Piece, earlier: Callable[[Chunk], Iterator[Piece]], following: Chunk | None
    ) -> Iterator[Piece]:
        """Those of one chunk of queries.

        Args:
            chunk: which.
            own: this rank's, of the chunk's own keys.
            earlier: gives this rank's of the keys before a chunk.
            following: the chunk that this will be called for next, whose first is sent for beforehand.
        """
        rest, coming = (earlier(chunk), None) if self._begun is None else self._begun
        self._begun = None  # every piece is let go with its calls
        for piece in itertools.chain(rest, [own]):
            ahead = self._send_for(piece)
            if coming is not None:
                yield self._arrived(coming)
            coming = ahead
        if following is not None:
            rest = earlier(following)
            first = next(rest, None)
            self._begun = rest, None if first is None else self._send_for(first)
        assert coming is not None
        yield self._arrived(coming)

    def _send_for(self, piece: Piece) -> _Coming:
        return piece, self._gather.gather(piece.k, piece.v)

    def _arrived(self, coming: _Coming) -> Piece:
        piece, pair = coming
        k, v = pair.wait()
        if piece.first is not None:
            k, v = (_in_order(x, self._gather.size) for x in (k, v))
        return replace(piece, k=k, v=v)


class Returns:
    """Gradients of gathered keys and values on their way back, while the next are computed.

    Args:
        gather: what brought them together.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._coming: _Coming | None = None

    def send(self, piece: Piece, pair: Pair) -> Iterator[tuple[Piece, Pair]]:
        """Send those of a piece; gives what has come back, for the rank's own keys."""
        yield from self.rest()
        if piece.first is not None:
            pair = _by_ranks(pair[0], self._gather.size), _by_ranks(pair[1], self._gather.size)
        self._coming = piece, self._gather.scatter(*pair)

    def rest(self) -> Iterator[tuple[Piece, Pair]]:
        """What is still on its way."""
        if self._coming is not None:
            piece, pair = self._coming
            self._coming = None
            yield piece, pair.wait()


def _in_order(x: Tensor, size: int) -> Tensor:
    """Keys (B, K, T, D), rank by rank, each rank's two slices, in the order of the sequence."""
    first, last = x.reshape(*x.shape[:2], size, 2, -1, x.shape[3]).unbind(3)  # (B, K, size, slice, D) each
    return torch.cat([first, last.flip(2)], 2).flatten(2, 3)


def _by_ranks(x: Tensor, size: int) -> Tensor:
    """The other way."""
    first, last = x.reshape(*x.shape[:2], 2, size, -1, x.shape[3]).unbind(2)
    return torch.stack([first, last.flip(2)], 3).flatten(2, 4)
