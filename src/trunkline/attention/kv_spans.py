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
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trunkline.attention.kernels import MAX_ELEMENTS, Kernel, PaddedKernel
from trunkline.attention.kv_gather import KeyValueGather, Pending
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import Range
from trunkline.attention.schedule import ChunkSchedule
from trunkline.chunking import Chunk, spans

# Most keys that one backward call takes: its scratch (dk and dv of so many) does not grow with the sequence. Longer
# spans are no faster: from 2,048 queries by 8,192 keys up, kernels reach what they ever reach.
SPAN = 16_384

_Coming: TypeAlias = "tuple[KVSpan, Pending[tuple[Tensor, Tensor]]]"


@dataclass(frozen=True, slots=True)
class KVSpan:
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


class KVSpans:
    """The pieces that each chunk of queries meets, its own keys last.

    Args:
        chunks: this rank's rows of each chunk.
        kv: its keys and values.
        num_resident: how many chunks, from the first, are in the buffers of `kv`.
        meetings: which chunks meet.
        gather: brings together keys and values that ranks hold in parts.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        kv: KVStore,
        num_resident: int,
        meetings: ChunkSchedule,
        gather: KeyValueGather | None,
    ) -> None:
        self._chunks = chunks
        self._kv = kv
        self._num_resident = num_resident
        self._meetings = meetings
        self._size = 1 if gather is None else gather.size
        self._gathered = None if gather is None else GatheredSpans(gather)

    def streamed_before(self, chunk: Chunk) -> range:
        """The streamed chunks that one meets besides itself: `kv` is to give them in this order."""
        met = self._meetings.before(chunk)
        return range(max(self._num_resident, met.start), met.stop)

    def of_chunk(
        self, chunk: Chunk, q: Tensor, own: KVPair, following: Chunk | None, kernel: Kernel, *, backward: bool = False
    ) -> Iterator[KVSpan]:
        """Those of one chunk.

        Args:
            chunk: which.
            q: its queries (B, H, C, D).
            own: its keys and values.
            following: the chunk that this will be called for next.
            kernel: that takes them.
            backward: for its gradients: no piece is then longer than `SPAN`.
        """
        if self._gathered is not None:
            last = self._last(chunk, own, chunk.start)
            yield from self._gathered.of_chunk(chunk, last, partial(self._to_gather, q), following)
            return
        # What a kernel pads it copies: no more than a span either.
        longest = SPAN if backward or isinstance(kernel, PaddedKernel) else None
        earlier, start = self._spans(chunk, q, longest), chunk.start
        if chunk.index < self._num_resident and earlier and kernel.bottom_right:
            *earlier, (start, _) = earlier
        for span in earlier:
            yield KVSpan(*self._kv.span(*span), span[0], span)
        for index in self.streamed_before(chunk):
            yield KVSpan(*self._kv.next_later(), self._meetings.starts[index], streamed=self._chunks[index])
        yield self._last(chunk, own, start)

    def _to_gather(self, q: Tensor, chunk: Chunk) -> Iterator[KVSpan]:
        """This rank's keys before a chunk, in pieces such that what is gathered does not grow with the sequence."""
        starts, met = self._meetings.starts, self._meetings.before(chunk)
        if self._meetings.is_causal:
            for span in self._spans(chunk, q, max(1, SPAN // self._size)):
                yield KVSpan(*self._kv.span(*span), None, span)
        else:
            for earlier in self._chunks[met.start : min(met.stop, self._num_resident)]:
                span = earlier.start, earlier.stop
                yield KVSpan(*self._kv.span(*span), starts[earlier.index], span)
        for index in self.streamed_before(chunk):
            first = None if self._meetings.is_causal else starts[index]
            yield KVSpan(*self._kv.next_later(), first, streamed=self._chunks[index])

    def _last(self, chunk: Chunk, own: KVPair, start: int) -> KVSpan:
        """The piece of a chunk's own keys, and of those before them from `start` on."""
        first = start if self._gathered is None else self._meetings.starts[chunk.index]
        if chunk.index < self._num_resident:
            return KVSpan(*self._kv.span(start, chunk.stop), first, (start, chunk.stop))
        return KVSpan(*own, first, streamed=chunk)

    def _spans(self, chunk: Chunk, q: Tensor, longest: int | None) -> list[Range]:
        """The spans of the buffers that are before a chunk and that it sees."""
        # H heads: dk may be expanded.
        width = -(-q.shape[3] // 8) * 8  # as kernels may pad it
        limit = MAX_ELEMENTS // (q.shape[0] * q.shape[1] * width * self._size) - len(chunk)
        if limit <= 0:
            raise ValueError(
                f"one chunk of {len(chunk):,} tokens has too many elements for a kernel (2^31): use a smaller "
                "chunk_size or a smaller batch."
            )
        stop = chunk.start if chunk.index < self._num_resident else self._kv.tokens
        return spans(min(self._meetings.first_keys[chunk.index], stop), stop, min(limit, longest or limit))


class GatheredSpans:
    """The pieces of all ranks' keys, from those of this rank's own; the next is on its way when one is given.

    Args:
        gather: brings them together.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._begun: tuple[Iterator[KVSpan], _Coming | None] | None = None  # of the chunk that follows

    def of_chunk(
        self, chunk: Chunk, own: KVSpan, earlier: Callable[[Chunk], Iterator[KVSpan]], following: Chunk | None
    ) -> Iterator[KVSpan]:
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

    def _send_for(self, piece: KVSpan) -> _Coming:
        return piece, self._gather.gather(piece.k, piece.v)

    def _arrived(self, coming: _Coming) -> KVSpan:
        piece, pair = coming
        k, v = pair.wait()
        if piece.first is not None:
            k, v = (_in_order(x, self._gather.size) for x in (k, v))
        return replace(piece, k=k, v=v)


class GradScatter:
    """Gradients of gathered keys and values on their way back, while the next are computed.

    Args:
        gather: what brought them together.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._coming: _Coming | None = None

    def send(self, piece: KVSpan, pair: KVPair) -> Iterator[tuple[KVSpan, KVPair]]:
        """Send those of a piece; gives what has come back, for the rank's own keys."""
        yield from self.rest()
        if piece.first is not None:
            pair = _by_ranks(pair[0], self._gather.size), _by_ranks(pair[1], self._gather.size)
        self._coming = piece, self._gather.scatter(*pair)

    def rest(self) -> Iterator[tuple[KVSpan, KVPair]]:
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
