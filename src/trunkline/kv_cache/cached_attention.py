"""Attention of new tokens over a cache and over themselves, for prefill and decoding.

The new tokens come chunk by chunk, in an order that is known beforehand: each chunk through all layers, or each layer
over all chunks. So keys and values in other tiers are fetched ahead, across layers. The loop over them is
`trunkline.attention.loop`, the same as in training.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from torch import Tensor

from trunkline.attention.kernel_base import Kernel
from trunkline.attention.kernels import resolve
from trunkline.attention.kv_spans import GatheredSpans, KVSpan, max_keys
from trunkline.attention.kv_store import KVPair
from trunkline.attention.loop import attend_spans
from trunkline.attention.mask import Range, RowMask
from trunkline.attention.scoring import Scoring
from trunkline.chunking import Chunk, zigzag
from trunkline.engine.ranks import Ranks
from trunkline.kv_cache.segment import KVFeed, SegmentView, StoredChunk
from trunkline.kv_cache.writers import DecodeBuffer, SegmentWriter


class CacheForward:
    """One forward of new tokens over a cache.

    Args:
        segments: the cache's keys and values.
        writer: stores the new keys and values.
        offset: position of the first new token.
        chunks: this rank's rows of the new tokens' chunks, in their own numbering.
        row_masks: for each layer, the mask of each row of the batch, or one for all rows.
        kernel: a kernel's name, or `auto`.
        ranks: share the sequence.
        part: (rank, size) of the ranks that hold parts of the cache while each rank has all new tokens: each attends
            to its own part, and outputs are merged. With size 1, keys of all ranks are gathered instead.
        by_chunk: a chunk goes through all layers before the next chunk; False runs all chunks through a layer first.
        prefetch: chunks of keys, as of values, on the device at a time; None for the setting of their stores.
    """

    def __init__(
        self,
        segments: Sequence[SegmentView],
        writer: SegmentWriter | DecodeBuffer,
        *,
        offset: int,
        chunks: list[Chunk],
        row_masks: Sequence[Sequence[RowMask]],
        kernel: str,
        ranks: Ranks,
        part: tuple[int, int],
        by_chunk: bool,
        prefetch: int | None,
    ) -> None:
        self.segments, self.writer, self.offset, self.chunks = segments, writer, offset, chunks
        self.row_masks, self.kernel, self.ranks, self.part = row_masks, kernel, ranks, part
        gather = ranks.kv_gather
        self.size, self.rank = (1, 0) if gather is None else (gather.size, gather.rank)
        layers = range(len(row_masks))
        self._kernels: dict[int, Kernel] = {}
        self._gathered = [] if gather is None else [GatheredSpans(gather) for _ in layers]
        order = [(i, chunk) for chunk in chunks for i in layers] if by_chunk else itertools.product(layers, chunks)
        self.feed = KVFeed((x for layer, chunk in order for x in self._streamed_order(layer, chunk)), prefetch)

    def attend(self, layer: int, chunk: Chunk, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        """Compute the attention of a layer on one chunk, and store its keys and values; chunks come in order.

        Keys that no later chunk sees are dropped.

        Args:
            layer: the layer.
            chunk: this rank's rows of the chunk.
            q: their queries (B, H, C, D).
            k: their keys (B, K, C, D).
            v: their values.
            scoring: scale, soft cap and sinks.

        Returns:
            The output (B, H, C, D) in the dtype of `q`.
        """
        if layer not in self._kernels:  # resolved once, not for every chunk
            shape = k.shape[-1], v.shape[-1]
            self._kernels[layer] = resolve(k.device, k.dtype, *shape, self.kernel, softcap=scoring.softcap)
        kernel = self._kernels[layer]
        dtype = kernel.compute_dtype(k.dtype)
        # Contiguous by head, not by token as layers return them: decoding reads them in two thirds of the time.
        own = k.to(dtype).contiguous(), v.to(dtype).contiguous()
        self.writer.append(layer, chunk, own)
        if self._gathered:
            spans = self._gathered_spans(layer, chunk, own)
        else:
            bottom_right = kernel.bottom_right or len(chunk) == 1
            spans = self._spans(layer, chunk, own, max_keys(q, len(chunk)), bottom_right=bottom_right)
        o, _ = attend_spans(
            q.to(dtype), spans, kernel, self._queries(chunk), self.row_masks[layer],
            scoring=scoring, pack_queries=True,
            by_row=any(view.rows is not None for view in self.segments),
            merge_ranks=self.ranks.merge_attention if self.part[1] > 1 else None, value_dim=v.shape[-1],
        )  # fmt: skip
        if chunk.index + 1 < len(self.chunks):
            self.writer.drop_before(layer, self._first_key(layer, self.chunks[chunk.index + 1]))
        return o.to(q.dtype)

    def _first_key(self, layer: int, chunk: Chunk) -> int:
        """Return the position of the first key that any row of a chunk sees."""
        return min(mask.first_key(self._start(chunk)) for mask in self.row_masks[layer])

    def _start(self, chunk: Chunk) -> int:
        """Return the position of the first token of a chunk, over all ranks."""
        return self.offset + chunk.start * self.size

    def _queries(self, chunk: Chunk) -> Sequence[Range]:
        """Return the position ranges of this rank's rows of a chunk."""
        start = self._start(chunk)
        return zigzag(Chunk(0, start, start + len(chunk) * self.size), self.rank, self.size).ranges

    def _streamed_order(self, layer: int, chunk: Chunk) -> Iterator[StoredChunk]:
        first_key = self._first_key(layer, chunk)
        for view in self.segments:
            yield from view.segment.streamed_order(layer, first_key, view.stop)
        yield from self.writer.streamed_order(layer, first_key, chunk)

    def _spans(self, layer: int, chunk: Chunk, own: KVPair, longest: int, *, bottom_right: bool) -> Iterator[KVSpan]:
        """Yield the keys and values that a chunk attends to on this rank: the cache's, then the new."""
        first_key = self._first_key(layer, chunk)
        for view in self.segments:
            if self.part[1] > 1:
                for span in view.segment.chunk_spans(layer, first_key, view.stop, self.feed):
                    yield from (replace(run, rows=view.rows) for run in _runs(span, *self.part))
            else:
                for span in view.segment.spans(layer, first_key, view.stop, self.feed, longest):
                    yield replace(span, rows=view.rows)
        if self.part[0] == 0:  # every rank has the new tokens: only the first attends to them
            yield from self.writer.spans(layer, first_key, chunk, own, self.feed, longest, bottom_right=bottom_right)

    def _gathered_spans(self, layer: int, chunk: Chunk, own: KVPair) -> Iterator[KVSpan]:
        """Yield the same where ranks hold parts of all keys: gathered from all ranks, chunk by chunk."""

        def earlier(chunk: Chunk) -> Iterator[KVSpan]:
            first_key = self._first_key(layer, chunk)
            for view in self.segments:
                for span in view.segment.chunk_spans(layer, first_key, view.stop, self.feed):
                    yield replace(span, rows=view.rows)
            assert isinstance(self.writer, SegmentWriter), "decoded tokens are on every rank, and never gathered"
            yield from self.writer.chunk_spans(layer, first_key, chunk, self.feed)

        following = self.chunks[chunk.index + 1] if chunk.index + 1 < len(self.chunks) else None
        # Padding in the chunk's own keys stays: its rows of padding attend to it, and no other row sees it.
        for span in self._gathered[layer].of_chunk(chunk, KVSpan(*own, self._start(chunk)), earlier, following):
            yield span.without_padding()


def _runs(span: KVSpan, rank: int, size: int) -> Iterator[KVSpan]:
    """Cut a rank's part of a chunk into runs of consecutive tokens, without padding; the span's positions are whole."""
    assert span.first is not None
    assert span.stop is not None
    at = 0
    for first, last in zigzag(Chunk(0, span.first, span.first + span.k.shape[2] * size), rank, size).ranges:
        if first < span.stop:
            count = min(last, span.stop) - first
            yield KVSpan(span.k[:, :, at : at + count], span.v[:, :, at : at + count], first)
        at += last - first
