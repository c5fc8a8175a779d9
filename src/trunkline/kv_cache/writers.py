"""Where keys and values of new tokens go: a stretch that is being written, or a cache's open end."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import Range
from trunkline.chunking import Chunk, spans
from trunkline.kv_cache.cached_attention import Later
from trunkline.kv_cache.segment import KVSegment
from trunkline.offload.stores import Stores


class SegmentWriter:
    """Writes a stretch, chunk by chunk; see `trunkline.kv_cache.cached_attention.KVWriter`.

    Args:
        stretch: that is written.
        windowed: layers whose tokens see so many keys at most that earlier ones are let go.
        spare: tokens before these that stay all the same.
        live: makes the buffers in which the layer under way has its first keys and values on the device where the
            stretch has them elsewhere; None where it has them there.
        num_live: chunks that these have room for.
    """

    def __init__(
        self,
        stretch: KVSegment,
        windowed: frozenset[int],
        spare: int,
        live: Callable[[], KVStore] | None = None,
        num_live: int = 0,
    ) -> None:
        self.stretch = stretch
        self._windowed, self._spare = windowed, spare
        self._live = live
        self._num_live = num_live
        self._buffers: KVStore | None = None

    def put(self, layer: int, chunk: Chunk, pair: KVPair) -> None:
        """See `KVWriter.put`."""
        if chunk.index == 0:
            self.end_layer()
        if len(self.stretch.chunks) == 1:  # kept as it is: it must not hold the queries that were projected with it
            k, v = (x if x.untyped_storage().nbytes() == x.nbytes else x.clone() for x in pair)
            pair = k, v
        self.stretch.pairs[layer].put(chunk, pair)
        if self.stretch.num_resident[layer] <= chunk.index < self._count(layer):
            assert self._live is not None
            self._buffers = self._live() if chunk.index == 0 else self._buffers
            assert self._buffers is not None
            self._buffers.put(chunk, pair)

    def later(self, layer: int, first_key: int, chunk: Chunk) -> Iterator[Later]:
        """See `KVWriter.later`."""
        count = self._count(layer)
        later = self.stretch.later(layer, first_key, self.stretch.places[chunk.index][0])
        return ((index, sequences) for index, sequences in later if index >= count)

    def pieces(
        self,
        layer: int,
        first_key: int,
        chunk: Chunk,
        pair: KVPair,
        feed: Iterator[KVPair],
        longest: int,
        *,
        joined: bool,
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """See `KVWriter.pieces`."""
        stretch, count = self.stretch, min(self._count(layer), chunk.index)
        met = stretch.first_met(first_key)
        if met < count:
            for first, last in spans(stretch.chunks[met].start, stretch.chunks[count - 1].stop, longest):
                yield *self._held(layer).span(first, last), stretch.start + first
        for index, _ in self.later(layer, first_key, chunk):
            yield *next(feed), stretch.places[index][0]
        yield *pair, stretch.places[chunk.index][0]

    def parts(
        self, layer: int, first_key: int, chunk: Chunk, feed: Iterator[KVPair]
    ) -> Iterator[tuple[Tensor, Tensor, Range]]:
        """See `KVWriter.parts`."""
        stretch, count = self.stretch, min(self._count(layer), chunk.index)
        for each in stretch.chunks[stretch.first_met(first_key) : chunk.index]:
            k, v = self._held(layer).span(each.start, each.stop) if each.index < count else next(feed)
            yield k, v, stretch.places[each.index]

    def let_go(self, layer: int, first_key: int) -> None:
        """See `KVWriter.let_go`."""
        if layer in self._windowed:
            self.stretch.let_go(layer, first_key - self._spare)

    def _count(self, layer: int) -> int:
        """Chunks of a layer that are in buffers while it is under way."""
        return max(self.stretch.num_resident[layer], 0 if layer in self._windowed else self._num_live)

    def _held(self, layer: int) -> KVStore:
        return self.stretch.pairs[layer] if self._buffers is None else self._buffers

    def end_layer(self) -> None:
        """The layer under way has had all chunks."""
        if self._buffers is not None:
            self._buffers.clear()
            self._buffers = None


class DecodeBuffer:
    """The last tokens of a cache, in buffers on the device that take new ones in place.

    Args:
        start: place of the first token.
        batch: rows.
        num_layers: decoder layers.
        capacity: tokens that the buffers have room for.
        stores: that count the buffers.
    """

    def __init__(self, start: int, batch: int, num_layers: int, capacity: int, stores: Stores) -> None:
        self.start, self.batch, self.capacity = start, batch, capacity
        self.filled = self.times_frozen = 0
        self._num_layers = num_layers
        self._stores = stores
        self._buffers: list[KVPair | None] = [None] * num_layers
        self._coming = 0  # tokens of the forward under way

    @property
    def stop(self) -> int:
        """Place after the last token."""
        return self.start + self.filled

    @property
    def room(self) -> int:
        """Tokens that it can still take."""
        return self.capacity - self.filled

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(x.nbytes for pair in self._buffers if pair is not None for x in pair)

    def put(self, layer: int, chunk: Chunk, pair: KVPair) -> None:
        """See `KVWriter.put`."""
        self._coming = len(chunk)
        buffers = self._buffers[layer]
        if buffers is None:
            with torch.inference_mode(False):  # it is written to later on, whatever the mode then
                k, v = (x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in pair)
            self._stores.acquire("device", k.nbytes + v.nbytes, "open")
            buffers = self._buffers[layer] = k, v
        for buffer, x in zip(buffers, pair, strict=True):
            buffer[:, :, self.filled : self.filled + len(chunk)] = x

    def grown(self) -> None:
        """All layers have put the tokens of a forward."""
        self.filled += self._coming
        self._coming = 0

    def later(self, layer: int, first_key: int, chunk: Chunk) -> Iterator[Later]:
        """See `KVWriter.later`."""
        return iter(())

    def pieces(
        self,
        layer: int,
        first_key: int,
        chunk: Chunk,
        pair: KVPair,
        feed: Iterator[KVPair],
        longest: int,
        *,
        joined: bool,
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """See `KVWriter.pieces`."""
        if joined:
            yield *self.span(layer, self.filled + len(chunk)), self.start
            return
        if self.filled:
            yield *self.span(layer, self.filled), self.start
        yield *pair, self.stop

    def parts(
        self, layer: int, first_key: int, chunk: Chunk, feed: Iterator[KVPair]
    ) -> Iterator[tuple[Tensor, Tensor, Range]]:
        """See `KVWriter.parts`: whoever has an open end has all of it."""
        raise AssertionError("an open end is never in parts")

    def let_go(self, layer: int, first_key: int) -> None:
        """See `KVWriter.let_go`: nothing of the buffers."""

    def span(self, layer: int, stop: int) -> KVPair:
        """Keys and values (B, K, stop, D) of a layer."""
        buffers = self._buffers[layer]
        assert buffers is not None
        return buffers[0][:, :, :stop], buffers[1][:, :, :stop]

    def emptied(self, start: int) -> None:
        """It begins anew, elsewhere."""
        self.start, self.filled = start, 0

    def shortened(self, stop: int) -> None:
        """Tokens from a place on count no longer."""
        self.start = min(self.start, stop)
        self.filled = min(self.filled, stop - self.start)

    def rearranged(self, rows: list[int], stores: Stores) -> DecodeBuffer:
        """A copy whose rows are these."""
        new = DecodeBuffer(self.start, len(rows), self._num_layers, self.capacity, stores)
        new.filled = self.filled
        for layer, pair in enumerate(self._buffers):
            if pair is not None:
                with torch.inference_mode(False):
                    k, v = (x[rows] for x in pair)
                stores.acquire("device", k.nbytes + v.nbytes, "open")
                new._buffers[layer] = k, v
        return new

    def close(self) -> None:
        """Let go of the buffers, and of the room that they had."""
        self._stores.close()
        self._buffers = [None] * self._num_layers
