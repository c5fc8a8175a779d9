"""Writers of new keys and values: `SegmentWriter` for prompts, `DecodeBuffer` for decoded tokens.

Both have the methods that a forward over a cache calls: `append`, `streamed_order`, `spans` and `drop_before`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from trunkline.attention.kv_spans import KVSpan
from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.chunking import Chunk
from trunkline.kv_cache.segment import Buffered, KVSegment, StoredChunk
from trunkline.offload.stores import Stores


class SegmentWriter:
    """Writer of a new segment, chunk by chunk.

    Args:
        segment: the segment.
        windowed: layers with a sliding window, which drop keys that lie before it.
        margin: tokens before the window that stay all the same.
        working_kv: makes the buffers that hold the first keys and values of the current layer on the device, where the
            segment has them in other tiers; None where the segment has them on the device.
        num_working: chunks that these buffers have room for.
    """

    def __init__(
        self,
        segment: KVSegment,
        windowed: frozenset[int],
        margin: int,
        working_kv: Callable[[], KVStore] | None = None,
        num_working: int = 0,
    ) -> None:
        self.segment = segment
        self._windowed, self._margin = windowed, margin
        self._working_kv = working_kv
        self._num_working = num_working
        self._buffers: KVStore | None = None

    def append(self, layer: int, chunk: Chunk, pair: KVPair) -> None:
        """Store keys and values (B, K, C, D) of this rank's part of a chunk; chunks of a layer come in order."""
        if chunk.index == 0:
            self.end_layer()
        if len(self.segment.chunks) == 1:  # kept without a copy: a view would hold the queries projected with it
            k, v = (x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in pair)
            pair = k, v
        self.segment.kv[layer].put(chunk, pair)
        if self.segment.num_resident[layer] <= chunk.index < self._num_buffered(layer):
            assert self._working_kv is not None
            self._buffers = self._working_kv() if chunk.index == 0 else self._buffers
            assert self._buffers is not None
            self._buffers.put(chunk, pair)

    def streamed_order(self, layer: int, first_key: int, chunk: Chunk) -> Iterator[StoredChunk]:
        """Yield the chunks before `chunk` that `spans` and `chunk_spans` take from a feed, in their order."""
        stop = self.segment.token_ranges[chunk.index][0]
        return self.segment.streamed_order(layer, first_key, stop, self._buffered(layer, chunk))

    def spans(
        self, layer: int, first_key: int, chunk: Chunk, pair: KVPair, feed: Iterator[KVPair], longest: int, *,
        bottom_right: bool,
    ) -> Iterator[KVSpan]:  # fmt: skip
        """Yield the new keys and values up to a chunk's own.

        Args:
            layer: the layer.
            first_key: position of the first key that is needed.
            chunk: the chunk.
            pair: its own keys and values.
            feed: gives streamed chunks.
            longest: most keys in a span of chunks in buffers; any other chunk is a span of its own.
            bottom_right: without effect here: the chunk's own keys are a span of their own.
        """
        start = self.segment.token_ranges[chunk.index][0]
        yield from self.segment.spans(layer, first_key, start, feed, longest, self._buffered(layer, chunk))
        yield KVSpan(*pair, start)

    def chunk_spans(self, layer: int, first_key: int, chunk: Chunk, feed: Iterator[KVPair]) -> Iterator[KVSpan]:
        """Yield this rank's part of each chunk before `chunk`; see `KVSegment.chunk_spans`."""
        start = self.segment.token_ranges[chunk.index][0]
        return self.segment.chunk_spans(layer, first_key, start, feed, self._buffered(layer, chunk))

    def drop_before(self, layer: int, first_key: int) -> None:
        """Drop streamed chunks that lie wholly before the margin of a window that begins at `first_key`.

        Resident chunks stay. Does nothing for a layer without a window.
        """
        if layer in self._windowed:
            self.segment.drop_before(layer, first_key - self._margin)

    def _num_buffered(self, layer: int) -> int:
        """Return how many chunks of a layer are in buffers while it is the current layer."""
        return max(self.segment.num_resident[layer], 0 if layer in self._windowed else self._num_working)

    def _buffered(self, layer: int, chunk: Chunk) -> Buffered:
        """Return the buffers of the current layer, and the number of chunks before `chunk` that are in them."""
        store = self.segment.kv[layer] if self._buffers is None else self._buffers
        return store, min(self._num_buffered(layer), chunk.index)

    def end_layer(self) -> None:
        """Drop the buffers of the current layer, after its last chunk."""
        if self._buffers is not None:
            self._buffers.clear()
            self._buffers = None


class DecodeBuffer:
    """The last tokens of a cache, in device buffers that new tokens are written into; every rank has all of them.

    Args:
        start: position of the first token.
        batch: rows.
        num_layers: decoder layers.
        capacity: tokens that the buffers have room for.
        stores: count the buffers.
    """

    def __init__(self, start: int, batch: int, num_layers: int, capacity: int, stores: Stores) -> None:
        self.start, self.batch, self.capacity = start, batch, capacity
        self.num_tokens = self.num_flushes = 0
        self._num_layers = num_layers
        self._stores = stores
        self._buffers: list[KVPair | None] = [None] * num_layers
        self._num_new = 0  # tokens of the running forward: they count once all layers have appended them

    @property
    def stop(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens

    @property
    def num_free(self) -> int:
        """Tokens that still fit."""
        return self.capacity - self.num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(x.nbytes for pair in self._buffers if pair is not None for x in pair)

    def append(self, layer: int, chunk: Chunk, pair: KVPair) -> None:
        """Write keys and values (B, K, C, D) of new tokens behind the last token; `commit` counts them."""
        self._num_new = len(chunk)
        buffers = self._buffers[layer]
        if buffers is None:
            with torch.inference_mode(False):  # later forwards write to it, in any mode
                k, v = (x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in pair)
            self._stores.acquire("device", k.nbytes + v.nbytes, "open")
            buffers = self._buffers[layer] = k, v
        for buffer, x in zip(buffers, pair, strict=True):
            buffer[:, :, self.num_tokens : self.num_tokens + len(chunk)] = x

    def commit(self) -> None:
        """Advance the number of tokens by the new ones, once all layers have appended them."""
        self.num_tokens += self._num_new
        self._num_new = 0

    def streamed_order(self, layer: int, first_key: int, chunk: Chunk) -> Iterator[StoredChunk]:
        """Yield nothing: all keys are in the buffers."""
        return iter(())

    def spans(
        self, layer: int, first_key: int, chunk: Chunk, pair: KVPair, feed: Iterator[KVPair], longest: int, *,
        bottom_right: bool,
    ) -> Iterator[KVSpan]:  # fmt: skip
        """Yield all keys and values in the buffers, then the new tokens' in a span of their own.

        With `bottom_right` both are one span. Of the other arguments only `layer`, `chunk` and `pair` have an effect.
        """
        if bottom_right:
            yield KVSpan(*self.view(layer, self.num_tokens + len(chunk)), self.start)
            return
        if self.num_tokens:
            yield KVSpan(*self.view(layer, self.num_tokens), self.start)
        yield KVSpan(*pair, self.stop)

    def drop_before(self, layer: int, first_key: int) -> None:
        """Do nothing: the buffers stay whole."""

    def view(self, layer: int, stop: int) -> KVPair:
        """Return views of the first `stop` keys and values of a layer, (B, K, stop, D)."""
        buffers = self._buffers[layer]
        assert buffers is not None
        return buffers[0][:, :, :stop], buffers[1][:, :, :stop]

    def reset(self, start: int) -> None:
        """Forget all tokens but keep the buffers; the next token is at position `start`."""
        self.start, self.num_tokens = start, 0

    def crop(self, stop: int) -> None:
        """Forget the tokens from position `stop` on; the buffers keep their size."""
        self.start = min(self.start, stop)
        self.num_tokens = min(self.num_tokens, stop - self.start)

    def select_rows(self, rows: list[int], stores: Stores) -> DecodeBuffer:
        """Return a copy with these rows of the batch, in this order and with repeats, counted by `stores`."""
        new = DecodeBuffer(self.start, len(rows), self._num_layers, self.capacity, stores)
        new.num_tokens = self.num_tokens
        for layer, pair in enumerate(self._buffers):
            if pair is not None:
                with torch.inference_mode(False):
                    k, v = (x[rows] for x in pair)
                stores.acquire("device", k.nbytes + v.nbytes, "open")
                new._buffers[layer] = k, v
        return new

    def close(self) -> None:
        """Drop the buffers."""
        self._stores.close()
        self._buffers = [None] * self._num_layers
