"""Segments: keys and values of consecutive tokens, for all layers, in any tier.

Once written they do not change, but layers with a window drop chunks. A cache is a list of segments. A prefill appends
one; decoded tokens become one whenever the decode buffer is full. Caches with a common prefix share its segments.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trunkline.attention.kv_spans import KVSpan
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import Range
from trunkline.chunking import Chunk, spans
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader, prefetch_more, read_next
from trunkline.offload.stores import Stores

StoredChunk = tuple[int, tuple[ChunkedSequence, ...]]  # index of a streamed chunk; its sequences of keys and of values
Buffered = tuple[KVStore, int]  # a store, and the number of chunks, counted from the first, in its buffers


class KVFeed:
    """Streamed keys and values in an order that is known beforehand, so that the next chunks are fetched ahead.

    Args:
        order: the chunks, in the order in which `next` returns them.
        prefetch: chunks of keys, as of values, on the device at a time; None for the setting of their stores.
    """

    def __init__(self, order: Iterator[StoredChunk], prefetch: int | None = None) -> None:
        keys, values = itertools.tee(order)
        self._readers = (
            Reader(((sequences[0], index) for index, sequences in keys), prefetch=prefetch),
            Reader(((sequences[1], index) for index, sequences in values), prefetch=prefetch),
        )

    def __iter__(self) -> KVFeed:
        return self

    def __next__(self) -> KVPair:
        k, v = read_next(self._readers)
        return k, v

    def __enter__(self) -> KVFeed:
        # Fetch the first chunks at once: resident keys, which are attended to before them, hide the wait.
        try:
            prefetch_more(self._readers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        """Release the last chunk returned, and cancel all fetches in flight."""
        for reader in self._readers:
            reader.cancel()


@dataclass(slots=True, eq=False, weakref_slot=True)
class KVSegment:
    """This rank's part of the keys and values of tokens `start … stop - 1` of a sequence.

    Attributes:
        start: position of the first token.
        stop: position after the last token.
        batch: rows.
        chunks: this rank's rows of each chunk, in their own numbering from 0.
        token_ranges: (start, stop) of each chunk's tokens in the sequence, over all ranks, without padding.
        kv: the store of each layer.
        num_resident: for each layer, the number of resident chunks, counted from the first.
        stores: where the stores rest.
        owners: the caches that hold this segment.
        num_dropped: for each layer, the number of chunks that were dropped, counted from the first.
    """

    start: int
    stop: int
    batch: int
    chunks: list[Chunk]
    token_ranges: list[Range]
    kv: list[KVStore]
    num_resident: list[int]
    stores: Stores
    owners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    num_dropped: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.num_dropped = [0] * len(self.kv)

    @property
    def nbytes(self) -> int:
        """Bytes that this rank holds now, in any tier."""
        return sum(store.nbytes for store in self.kv)

    @property
    def is_mergeable(self) -> bool:
        """True if it is one streamed chunk of exactly its tokens, without padding."""
        bounds = self.chunks[0].start, self.chunks[-1].stop
        return len(self.chunks) == 1 and not any(self.num_resident) and bounds == (0, self.stop - self.start)

    @property
    def is_dropped(self) -> bool:
        """True if every chunk of every layer was dropped."""
        return all(count == len(self.chunks) for count in self.num_dropped)

    @contextlib.contextmanager
    def lend(self, layer: int, chunk: Chunk) -> Iterator[KVPair]:
        """Lend the keys and values of a chunk for the duration of a `with`; buffers are reused after it."""
        store, count = self._resident(layer)
        if chunk.index < count:
            yield store.view(chunk.start, chunk.stop)
            return
        with KVFeed(iter([(chunk.index, store.sequences)])) as feed:
            yield next(feed)

    def to_host(self, chunk: Chunk) -> dict[str, Tensor]:
        """Copy a chunk to the CPU: `k.0`, `v.0`, `k.1`, …; layers that dropped it are left out."""
        tensors: dict[str, Tensor] = {}
        for layer, num_dropped in enumerate(self.num_dropped):
            if chunk.index >= num_dropped:
                with self.lend(layer, chunk) as pair:
                    for kind, x in zip("kv", pair, strict=True):
                        tensors[f"{kind}.{layer}"] = x.to("cpu", copy=True, memory_format=torch.contiguous_format)
        return tensors

    def close(self) -> None:
        """Drop all chunks, after the only cache of this segment has copied them to another segment."""
        self.owners.clear()
        for store in self.kv:
            store.clear()
        self.stores.close()

    def first_chunk(self, first_key: int) -> int:
        """Return the index of the first chunk with a key at or after a position; the number of chunks if none has."""
        return next((i for i, (_, stop) in enumerate(self.token_ranges) if stop > first_key), len(self.chunks))

    def streamed_order(
        self, layer: int, first_key: int, stop: int, buffered: Buffered | None = None
    ) -> Iterator[StoredChunk]:
        """Yield the chunks that `spans` and `chunk_spans` take from a feed, in their order."""
        _, count = buffered or self._resident(layer)
        for index in range(max(self.first_chunk(first_key), count), len(self.chunks)):
            if self.token_ranges[index][0] < stop:
                yield index, self.kv[layer].sequences

    def spans(
        self, layer: int, first_key: int, stop: int, feed: Iterator[KVPair], longest: int,
        buffered: Buffered | None = None,
    ) -> Iterator[KVSpan]:  # fmt: skip
        """Yield keys and values of a layer, those in buffers in long spans, each other chunk as a span.

        Args:
            layer: the layer.
            first_key: position of the first key that is needed; the spans begin with the chunk that has it.
            stop: position after the last key that is needed; later keys are cut off.
            feed: gives the chunks of `streamed_order`.
            longest: most keys in a span of buffers.
            buffered: a store, and the number of chunks that are in its buffers; None for the layer's resident chunks.
        """
        store, count = buffered or self._resident(layer)
        needed = self.first_chunk(first_key)
        if needed < count:
            end = min(self.token_ranges[count - 1][1], stop) - self.start
            for first, last in spans(self.chunks[needed].start, end, longest):
                yield KVSpan(*store.view(first, last), self.start + first)
        for index, _ in self.streamed_order(layer, first_key, stop, buffered):
            first, last = self.token_ranges[index]
            k, v = next(feed)
            yield KVSpan(k[:, :, : min(last, stop) - first], v[:, :, : min(last, stop) - first], first)

    def chunk_spans(
        self, layer: int, first_key: int, stop: int, feed: Iterator[KVPair], buffered: Buffered | None = None
    ) -> Iterator[KVSpan]:
        """Yield this rank's part of each chunk, padding included, with the positions of the chunk's tokens.

        Arguments are those of `spans`.
        """
        store, count = buffered or self._resident(layer)
        for index in range(self.first_chunk(first_key), len(self.chunks)):
            first, last = self.token_ranges[index]
            if first < stop:
                chunk = self.chunks[index]
                pair = store.view(chunk.start, chunk.stop) if index < count else next(feed)
                yield KVSpan(*pair, first, min(last, stop))

    def _resident(self, layer: int) -> Buffered:
        return self.kv[layer], self.num_resident[layer]

    def dropped_until(self, layer: int) -> int:
        """Return the position up to which a layer's keys were dropped; 0 if none were."""
        return self.token_ranges[self.num_dropped[layer] - 1][1] if self.num_dropped[layer] else 0

    def drop_before(self, layer: int, first_key: int) -> None:
        """Drop the streamed chunks of a layer whose tokens all lie before position `first_key`; resident ones stay."""
        needed = self.first_chunk(first_key)
        if needed > max(self.num_dropped[layer], self.num_resident[layer]):
            self.kv[layer].drop(range(self.num_dropped[layer], needed))
            self.num_dropped[layer] = needed


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment as one cache reads it.

    Attributes:
        segment: keys and values.
        stop: position after the last token that belongs to the cache; it may have been cropped.
        rows: the row of the segment that each row of the cache reads; None where they are the same.
    """

    segment: KVSegment
    stop: int
    rows: tuple[int, ...] | None = None


def read_bytes(segment: KVSegment, token_bytes: Sequence[Sequence[int]]) -> int:
    """Return the device bytes that reading a segment takes: chunks being fetched, and the chunk in use.

    Args:
        segment: the segment.
        token_bytes: for each layer, bytes of a token's keys and of its values, in one row.
    """
    return (segment.stores.prefetch + 1) * max_chunk_bytes(segment, token_bytes)


def max_chunk_bytes(segment: KVSegment, token_bytes: Sequence[Sequence[int]]) -> int:
    """Return the bytes of keys and values of the longest chunk, in the layer where a token takes most."""
    return max(map(len, segment.chunks)) * segment.batch * max(map(sum, token_bytes))


def num_transit_buffers(prefetch: int) -> int:
    """Return the buffers that a group of stores needs for its moves: chunks being fetched, and chunks being sent."""
    return prefetch + 1 + max(prefetch - 1, 1)
