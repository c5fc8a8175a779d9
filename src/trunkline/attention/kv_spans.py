"""Spans: the keys and values that a chunk of queries attends to, in pieces that kernels take.

Where each rank holds a part of the keys, a span of this rank's keys stands for the same span of every rank: all parts
are gathered, the next span while this one is in use, and gradients are summed over ranks and scattered again. Where
every row sees the whole span the order of its keys means nothing. Otherwise the span is one chunk, of which each rank
has two slices (`trunkline.chunking.zigzag`), and these are put in the order of the sequence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from trunkline.attention.kernel_base import MAX_ELEMENTS, Kernel
from trunkline.attention.kernels import PaddedKernel
from trunkline.attention.kv_gather import KeyValueGather, Pending
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import Range
from trunkline.attention.schedule import ChunkSchedule
from trunkline.chunking import Chunk, spans

# Most keys of one backward call: its scratch (dk and dv of these keys) must not grow with the sequence. Longer spans
# are no faster: from 2,048 queries by 8,192 keys up, kernels run at their full rate.
SPAN = 16_384

_Pending: TypeAlias = "tuple[KVSpan, Pending[KVPair]]"


@dataclass(frozen=True, slots=True)
class KVSpan:
    """Keys and values of consecutive tokens: this rank's part of them, or, once gathered, all of them.

    Attributes:
        k: keys (B, K, T, D).
        v: values (B, K, T, D).
        first: position of the first key in the sequence; None where every query row sees every key.
        stop: position after the last key; None for `first` + T. Keys from there on are padding.
        rows: the row of `k` and `v` that each row of the batch reads; None where they are the same.
        resident: (start, stop) in this rank's resident buffers; None for a streamed chunk, and in caches.
        streamed: the chunk, where it is streamed in training; else None.
    """

    k: Tensor
    v: Tensor
    first: int | None
    stop: int | None = None
    rows: tuple[int, ...] | None = None
    resident: Range | None = None
    streamed: Chunk | None = None

    def without_padding(self) -> KVSpan:
        """Return the span with its padding cut off."""
        if self.first is None or self.stop is None:
            return self
        count = self.stop - self.first
        return replace(self, k=self.k[:, :, :count], v=self.v[:, :, :count])


def max_keys(q: Tensor, count: int, size: int = 1) -> int:
    """Return the most keys that each rank may give to one kernel call: no tensor of the call reaches 2^31 elements.

    Args:
        q: queries (B, H, C, D).
        count: tokens of the query chunk; their own keys may come on top.
        size: number of ranks whose keys are gathered for the call.

    Raises:
        ValueError: not even one key fits.
    """
    padded_dim = -(-q.shape[3] // 8) * 8  # kernels pad the head dim
    # Query heads, not key/value heads: kernels may expand dk and dv to them.
    limit = MAX_ELEMENTS // (q.shape[0] * q.shape[1] * padded_dim * size) - count
    if limit <= 0:
        raise ValueError(
            f"one chunk of {count:,} tokens has too many elements for a kernel (2^31): use a smaller chunk_size or "
            "a smaller batch."
        )
    return limit


class KVSpans:
    """Spans of each chunk of queries in training, the chunk's own keys last.

    Args:
        chunks: this rank's query rows of each chunk, numbered from 0 on this rank.
        kv: keys and values of the same tokens.
        num_resident: number of chunks, counted from the first, that are in the buffers of `kv`.
        schedule: which chunks see each other.
        gather: gathers the parts of keys and values that ranks hold; None where this rank has all of them.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        kv: KVStore,
        num_resident: int,
        schedule: ChunkSchedule,
        gather: KeyValueGather | None,
    ) -> None:
        self._chunks = chunks
        self._kv = kv
        self._num_resident = num_resident
        self._schedule = schedule
        self._size = 1 if gather is None else gather.size
        self._gathered = None if gather is None else GatheredSpans(gather)

    def streamed_earlier(self, chunk: Chunk) -> range:
        """Return the indices of the earlier streamed chunks that a chunk sees.

        Before `of_chunk` runs, `KVStore.read_streamed` must be told to read them in this order.
        """
        earlier = self._schedule.earlier(chunk)
        return range(max(self._num_resident, earlier.start), earlier.stop)

    def of_chunk(
        self, chunk: Chunk, q: Tensor, own: KVPair, following: Chunk | None, kernel: Kernel, *, backward: bool = False
    ) -> Iterator[KVSpan]:
        """Yield the spans of one chunk of queries: views of buffers, streamed chunks, or gathered from all ranks.

        Use a span before you ask for the next one.

        Args:
            chunk: this rank's rows of the chunk.
            q: its queries (B, H, C, D); only their shape is read.
            own: its keys and values, in the kernel's dtype; not read where they are resident.
            following: the chunk that this method is called for next, or None; its first span is gathered ahead, which
                only happens over ranks.
            kernel: kernel that will attend to the spans.
            backward: make spans for gradients: none of earlier keys is longer than `SPAN`.
        """
        if self._gathered is not None:
            last = self._own_span(chunk, own, chunk.start)
            yield from self._gathered.of_chunk(chunk, last, partial(self._to_gather, q), following)
            return
        # A padded kernel copies what it pads, so that its spans are short in the forward, too.
        longest = SPAN if backward or isinstance(kernel, PaddedKernel) else None
        earlier, start = self._resident_spans(chunk, q, longest), chunk.start
        if chunk.index < self._num_resident and earlier and kernel.bottom_right:
            *earlier, (start, _) = earlier  # one call takes the last earlier span and the chunk's own keys
        for resident in earlier:
            yield KVSpan(*self._kv.view(*resident), resident[0], resident=resident)
        for index in self.streamed_earlier(chunk):
            yield KVSpan(*self._kv.next_streamed(), self._schedule.starts[index], streamed=self._chunks[index])
        yield self._own_span(chunk, own, start)

    def _to_gather(self, q: Tensor, chunk: Chunk) -> Iterator[KVSpan]:
        """Yield this rank's keys before a chunk, in spans whose gathered size does not grow with the sequence."""
        starts, earlier = self._schedule.starts, self._schedule.earlier(chunk)
        if self._schedule.is_causal:
            for resident in self._resident_spans(chunk, q, max(1, SPAN // self._size)):
                yield KVSpan(*self._kv.view(*resident), None, resident=resident)
        else:
            for before in self._chunks[earlier.start : min(earlier.stop, self._num_resident)]:
                resident = before.start, before.stop
                yield KVSpan(*self._kv.view(*resident), starts[before.index], resident=resident)
        for index in self.streamed_earlier(chunk):
            first = None if self._schedule.is_causal else starts[index]
            yield KVSpan(*self._kv.next_streamed(), first, streamed=self._chunks[index])

    def _own_span(self, chunk: Chunk, own: KVPair, start: int) -> KVSpan:
        """Return the span of a chunk's own keys; of a resident chunk, with the keys before it from `start` on."""
        first = start if self._gathered is None else self._schedule.starts[chunk.index]
        if chunk.index < self._num_resident:
            return KVSpan(*self._kv.view(start, chunk.stop), first, resident=(start, chunk.stop))
        return KVSpan(*own, first, streamed=chunk)

    def _resident_spans(self, chunk: Chunk, q: Tensor, longest: int | None) -> list[Range]:
        """Return the ranges of the resident buffers that lie before a chunk and that it sees."""
        limit = max_keys(q, len(chunk), self._size)
        stop = chunk.start if chunk.index < self._num_resident else self._kv.num_resident_tokens
        return spans(min(self._schedule.first_keys[chunk.index], stop), stop, min(limit, longest or limit))


class GatheredSpans:
    """Spans of all ranks' keys, gathered from this rank's; the next gather is in flight while a span is used.

    Args:
        gather: gathers keys and values.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._ahead: tuple[Iterator[KVSpan], _Pending | None] | None = None  # of the chunk that follows

    def of_chunk(
        self, chunk: Chunk, own: KVSpan, earlier: Callable[[Chunk], Iterator[KVSpan]], following: Chunk | None
    ) -> Iterator[KVSpan]:
        """Yield the spans of one chunk of queries, the chunk's own keys last.

        Args:
            chunk: this rank's rows of the chunk.
            own: this rank's part of the chunk's own keys.
            earlier: yields this rank's part of the keys before a chunk.
            following: the chunk that this method is called for next, or None; its first span is gathered ahead.
        """
        rest, pending = (earlier(chunk), None) if self._ahead is None else self._ahead
        self._ahead = None  # drop the references: two gathered spans are held at a time, no more
        for span in itertools.chain(rest, [own]):
            ahead = self._send_for(span)
            if pending is not None:
                yield self._arrived(pending)
            pending = ahead
        if following is not None:
            rest = earlier(following)
            first = next(rest, None)
            self._ahead = rest, None if first is None else self._send_for(first)
        assert pending is not None
        yield self._arrived(pending)

    def _send_for(self, span: KVSpan) -> _Pending:
        return span, self._gather.gather(span.k, span.v)

    def _arrived(self, pending: _Pending) -> KVSpan:
        span, pair = pending
        k, v = pair.wait()
        if span.first is not None:
            k, v = (_by_position(x, self._gather.size) for x in (k, v))
        return replace(span, k=k, v=v)


class GradScatter:
    """Reduce-scatter of the gradients of gathered spans: one is in flight while the next is computed.

    Args:
        gather: gathered the keys and values.
    """

    def __init__(self, gather: KeyValueGather) -> None:
        self._gather = gather
        self._pending: _Pending | None = None

    def send(self, span: KVSpan, gradients: KVPair) -> Iterator[tuple[KVSpan, KVPair]]:
        """Send this rank's gradients of a gathered span; yield the span before it, with gradients of this rank's keys.

        These are summed over all ranks.
        """
        yield from self.rest()
        if span.first is not None:
            gradients = _by_rank(gradients[0], self._gather.size), _by_rank(gradients[1], self._gather.size)
        self._pending = span, self._gather.scatter(*gradients)

    def rest(self) -> Iterator[tuple[KVSpan, KVPair]]:
        """Wait for the reduce-scatter in flight, and yield its gradients; yield nothing without one."""
        if self._pending is not None:
            span, gradients = self._pending
            self._pending = None
            yield span, gradients.wait()


def _by_position(x: Tensor, size: int) -> Tensor:
    """Reorder keys (B, K, T, D) from rank by rank (two zigzag slices each) to the order of the sequence."""
    first, last = x.reshape(*x.shape[:2], size, 2, -1, x.shape[3]).unbind(3)  # (B, K, size, slice, D) each
    return torch.cat([first, last.flip(2)], 2).flatten(2, 3)


def _by_rank(x: Tensor, size: int) -> Tensor:
    """Reorder keys (B, K, T, D) from the order of the sequence to rank by rank; the inverse of `_by_position`."""
    first, last = x.reshape(*x.shape[:2], 2, size, -1, x.shape[3]).unbind(2)
    return torch.stack([first, last.flip(2)], 3).flatten(2, 4)
