"""Keys and values of consecutive tokens, for all layers, wherever they rest; once written they do not change.

A cache is made of these, one after another: what one prefill has left is one, and decoded tokens become one whenever
their open end is full. Several caches may share one: continuations of the same prefix do.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from trunkline.attention.kv_store import KVPair, KVStore
from trunkline.attention.mask import Range
from trunkline.chunking import Chunk, spans
from trunkline.offload.chunked_sequence import ChunkedSequence, read_next
from trunkline.offload.placement import FitHints, StoreRequest
from trunkline.offload.stores import Stores, Tiers

ADVICE = FitHints(less="a shorter input or a smaller batch")


@dataclass(slots=True, eq=False, weakref_slot=True)
class KVSegment:
    """Keys and values of tokens `start … stop - 1` of a sequence.

    Attributes:
        start: place of the first token.
        stop: place after the last.
        batch: rows.
        chunks: this rank's rows of each chunk, in their own numbering from 0.
        places: (start, stop) of each chunk's tokens in the sequence, without padding.
        pairs: keys and values of each layer.
        num_resident: of each layer, how many chunks from the first share one buffer on the device.
        stores: where they rest.
        owners: the caches that hold it.
        passed: of each layer, how many chunks from the first were let go.
    """

    start: int
    stop: int
    batch: int
    chunks: list[Chunk]
    places: list[Range]
    pairs: list[KVStore]
    num_resident: list[int]
    stores: Stores
    owners: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    passed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.passed = [0] * len(self.pairs)

    @property
    def nbytes(self) -> int:
        """Bytes held, in whichever tier."""
        return sum(pair.nbytes for pair in self.pairs)

    @property
    def is_frozen(self) -> bool:
        """Whether it is one chunk, in no buffer, of exactly its tokens: that others may be joined to."""
        whole = self.chunks[0].start, self.chunks[-1].stop
        return len(self.chunks) == 1 and not any(self.num_resident) and whole == (0, self.stop - self.start)

    @contextlib.contextmanager
    def one(self, layer: int) -> Iterator[KVPair]:
        """Keys and values of a stretch that is one chunk."""
        readers = [sequence.read([0]) for sequence in self.pairs[layer].later]
        try:
            k, v = read_next(readers)
            yield k, v
        finally:
            for reader in readers:
                reader.cancel()

    def close(self) -> None:
        """Hold nothing any longer: the one cache that had it has it elsewhere."""
        self.owners.clear()
        for pairs in self.pairs:
            pairs.clear()
        self.stores.close()

    @property
    def is_passed(self) -> bool:
        """Whether no layer holds anything of it any longer."""
        return all(count == len(self.chunks) for count in self.passed)

    def first_met(self, first_key: int) -> int:
        """The first chunk with a key at or behind a place."""
        return next((i for i, (_, stop) in enumerate(self.places) if stop > first_key), len(self.places))

    def later(self, layer: int, first_key: int, stop: int) -> Iterator[tuple[int, tuple[ChunkedSequence, ...]]]:
        """Chunks that `pieces` takes from a feed, in its order, with the sequences that they are in."""
        first = max(self.first_met(first_key), self.num_resident[layer])
        for index in range(first, len(self.chunks)):
            if self.places[index][0] < stop:
                yield index, self.pairs[layer].later

    def pieces(
        self, layer: int, first_key: int, stop: int, feed: Iterator[KVPair], longest: int
    ) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Keys and values (B, K, T, D), with the place of the first.

        Args:
            layer: whose.
            first_key: from which place on they are wanted.
            stop: up to which.
            feed: gives those that are in no buffer.
            longest: most tokens in a piece.
        """
        count, met = self.num_resident[layer], self.first_met(first_key)
        if met < count:
            end = min(self.places[count - 1][1], stop) - self.start
            for first, last in spans(self.chunks[met].start, end, longest):
                yield *self.pairs[layer].span(first, last), self.start + first
        for index, _ in self.later(layer, first_key, stop):
            first, last = self.places[index]
            k, v = next(feed)
            yield k[:, :, : min(last, stop) - first], v[:, :, : min(last, stop) - first], first

    def parts(
        self, layer: int, first_key: int, stop: int, feed: Iterator[KVPair]
    ) -> Iterator[tuple[Tensor, Tensor, Range]]:
        """The same chunk by chunk as this rank has them, with the places of each chunk's tokens on all ranks."""
        for index in range(self.first_met(first_key), len(self.chunks)):
            first, last = self.places[index]
            if first < stop:
                chunk = self.chunks[index]
                resident = index < self.num_resident[layer]
                k, v = self.pairs[layer].span(chunk.start, chunk.stop) if resident else next(feed)
                yield k, v, (first, min(last, stop))

    def gone(self, layer: int) -> int:
        """Place up to which a layer holds nothing of it any longer; 0 where it holds all."""
        return self.places[self.passed[layer] - 1][1] if self.passed[layer] else 0

    def let_go(self, layer: int, first_key: int) -> None:
        """Hold chunks of a layer no longer that no key from a place on is in."""
        met = self.first_met(first_key)
        if met > max(self.passed[layer], self.num_resident[layer]):
            self.pairs[layer].drop(range(self.passed[layer], met))
            self.passed[layer] = met


def stores_of(
    tiers: Tiers, batch: int, chunks: Sequence[Chunk], widths: Sequence[Sequence[int]], passed: Sequence[int],
    rooms: Sequence[int],
) -> Stores:  # fmt: skip
    """Stores for a stretch that is there already.

    Args:
        tiers: of the model.
        batch: rows.
        chunks: of them.
        widths: bytes of a token's keys and values, of each layer and row.
        passed: how many chunks from the first each layer goes without.
        rooms: bytes of the device that they leave free: the first with which they fit.

    Raises:
        ValueError: they do not fit in the budgets.
    """
    if not tiers.limited:
        return Stores(tiers)
    transit = in_transit(tiers.prefetch)
    requests = []
    for layer, pair in enumerate(widths):
        counts = [0 if chunk.index < passed[layer] else len(chunk) * batch for chunk in chunks]
        sizes = tuple(tuple(count * width for count in counts) for width in pair)
        requests.append(StoreRequest((f"k {layer}", f"v {layer}"), sizes, "kv", transit, 0, persistent=True))
    *some, last = rooms
    for room in some:
        with contextlib.suppress(ValueError):
            return Stores(tiers, tiers.place(requests, ADVICE, headroom=room))
    return Stores(tiers, tiers.place(requests, ADVICE, headroom=last))


def reading_bytes(stretch: KVSegment, widths: Sequence[Sequence[int]]) -> int:
    """Bytes of the device that reading a stretch takes: what is fetched, and what is met.

    Args:
        stretch: which.
        widths: bytes of a token's keys and values, of each layer and row.
    """
    return (stretch.stores.prefetch + 1) * pair_bytes(stretch, widths)


def pair_bytes(stretch: KVSegment, widths: Sequence[Sequence[int]]) -> int:
    """Most bytes of a chunk's keys and values in one layer."""
    return max(map(len, stretch.chunks)) * stretch.batch * max(map(sum, widths))


def in_transit(prefetch: int) -> int:
    """Buffers that the moves of one group of stores take: those that are fetched, and those that are sent."""
    return prefetch + 1 + max(prefetch - 1, 1)
