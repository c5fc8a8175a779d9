"""Store of a layer's keys and values, or of their gradients: one buffer for the first chunks, the others streamed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from torch import Tensor

from trunkline.chunking import Chunk
from trunkline.offload.chunked_sequence import ChunkedSequence, Reader, dense, read_next
from trunkline.offload.stores import Stores

KVPair = tuple[Tensor, Tensor]


class KVStore:
    """Two tensors (B, K, C, D) for each chunk: keys and values, or the sums of their gradients.

    The first chunks are *resident*: slices of one buffer on the device, so that many of them are one view. The others
    are *streamed*: a tensor each, in whichever tier its store was placed.

    Args:
        chunks: this rank's query rows of each chunk, numbered from 0 on this rank.
        num_resident: number of resident chunks, counted from the first.
        stores: stores of the step. They count the bytes of all chunks, and hold the streamed ones.
        names: names of the two stores.
        num_slots: most streamed chunks that are held at a time, each in slot `index % num_slots`; None for a slot for
            each chunk.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        num_resident: int,
        stores: Stores,
        names: tuple[str, str],
        num_slots: int | None = None,
    ) -> None:
        self.num_resident_tokens = chunks[num_resident - 1].stop if num_resident else 0
        self._chunks = chunks
        self._is_one_chunk = len(chunks) == num_resident == 1
        self._num_resident = num_resident
        self._stores = stores
        self._buffers: tuple[Tensor, ...] = ()
        self._streamed = tuple(ChunkedSequence(len(chunks), stores, name, num_slots) for name in names)
        self._kinds = tuple(sequence.kind for sequence in self._streamed)
        self._readers: tuple[Reader, ...] = ()

    def put(self, chunk: Chunk, pair: KVPair) -> None:
        """Store the tensors of a chunk: copy them into the buffers, or stash them if the chunk is streamed."""
        if chunk.index >= self._num_resident:
            for sequence, x in zip(self._streamed, pair, strict=True):
                sequence.stash(chunk.index, dense(x))
        elif self._is_one_chunk:
            self._hold(pair)  # the tensors themselves are the buffers: no copy
        else:
            if not self._buffers:
                self._hold(tuple(x.new_empty(*x.shape[:2], self.num_resident_tokens, x.shape[3]) for x in pair))
            for buffer, x in zip(self._buffers, pair, strict=True):
                buffer[:, :, chunk.start : chunk.stop].copy_(x)

    def save_resident(self, chunk: Chunk, pair: KVPair) -> None:
        """Copy a resident chunk to its tier, so that other layers can use the buffer; do nothing if it is streamed."""
        if chunk.index < self._num_resident:
            for sequence, x in zip(self._streamed, pair, strict=True):
                sequence.stash(chunk.index, dense(x))

    def restore_resident(self) -> None:
        """Load the saved resident chunks into the buffers; their saved copies stay in their tier."""
        order = range(self._num_resident)
        for i, *pair in zip(order, *(sequence.read(order) for sequence in self._streamed), strict=True):
            k, v = pair
            self.put(self._chunks[i], (k, v))

    def zero_buffers(self, like: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Allocate zeroed buffers with B, K and D of two tensors (B, K, *, D); keep existing buffers."""
        if self.num_resident_tokens and not self._buffers:
            self._hold(
                tuple(x.new_zeros(*x.shape[:2], self.num_resident_tokens, x.shape[3], dtype=dtype) for x in like)
            )

    def view(self, start: int, stop: int) -> KVPair:
        """Return views of the buffers, (B, K, stop - start, D), of resident tokens `start … stop - 1` of this rank."""
        a, b = (buffer[:, :, start:stop] for buffer in self._buffers)
        return a, b

    def read_streamed(self, order: Iterable[int], *, take: bool = False) -> None:
        """Announce the order in which `next_streamed` returns chunks, so that they are fetched ahead.

        Args:
            order: indices of streamed chunks.
            take: each chunk leaves the store as it is returned.
        """
        self._readers = tuple(
            sequence.read(each, take=take) for sequence, each in zip(self._streamed, itertools.tee(order), strict=True)
        )

    def next_streamed(self) -> KVPair:
        """Return the tensors of the next announced chunk."""
        a, b = read_next(self._readers)
        return a, b

    def drop(self, indices: Iterable[int]) -> None:
        """Drop streamed chunks; skip chunks that are not stored."""
        for sequence in self._streamed:
            for index in indices:
                sequence.drop(index)

    def end_reading(self) -> None:
        """Release the last chunk returned; no announced read may be left."""
        for reader in self._readers:
            reader.release()
        self._readers = ()

    def clear(self) -> None:
        """Drop all chunks: the buffers, and the streamed and saved chunks in tiers."""
        self.end_reading()
        self.clear_buffers()
        for sequence in self._streamed:
            sequence.clear()

    def clear_buffers(self) -> None:
        """Drop the buffers of resident chunks; chunks in tiers stay."""
        for buffer, kind in zip(self._buffers, self._kinds, strict=False):
            self._stores.release("device", buffer.nbytes, kind)
        self._buffers = ()

    @property
    def sequences(self) -> tuple[ChunkedSequence, ...]:
        """The two sequences of streamed (and saved) chunks."""
        return self._streamed

    @property
    def nbytes(self) -> int:
        """Bytes held now, in any tier."""
        return sum(x.nbytes for x in self._buffers) + sum(x.nbytes for x in self._streamed)

    def _hold(self, buffers: tuple[Tensor, ...]) -> None:
        for buffer, kind in zip(buffers, self._kinds, strict=True):
            self._stores.acquire("device", buffer.nbytes, kind)
        self._buffers = buffers
