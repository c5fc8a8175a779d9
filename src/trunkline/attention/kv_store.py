"""Keys and values of a layer, or their gradients: those of the first chunks one buffer, the rest chunk by chunk."""

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
    """Two tensors (B, K, C, D) for each chunk.

    Args:
        chunks: of the sequence.
        num_resident: how many chunks, from the first, share one buffer on the device.
        stores: where the other chunks rest.
        names: of the two stores.
        num_slots: that chunks beyond the buffers take turns in, so many being held at a time; None for one of each.
    """

    def __init__(
        self,
        chunks: list[Chunk],
        num_resident: int,
        stores: Stores,
        names: tuple[str, str],
        num_slots: int | None = None,
    ) -> None:
        self.tokens = chunks[num_resident - 1].stop if num_resident else 0  # in the buffers
        self._chunks = chunks
        self._single = len(chunks) == num_resident == 1
        self._num_resident = num_resident
        self._stores = stores
        self._buffers: tuple[Tensor, ...] = ()
        self._later = tuple(ChunkedSequence(len(chunks), stores, name, num_slots) for name in names)
        self._kinds = tuple(sequence.kind for sequence in self._later)
        self._readers: tuple[Reader, ...] = ()

    def put(self, chunk: Chunk, pair: KVPair) -> None:
        """Keep the tensors of a chunk."""
        if chunk.index >= self._num_resident:
            for sequence, x in zip(self._later, pair, strict=True):
                sequence.stash(chunk.index, dense(x))
        elif self._single:
            self._hold(pair)
        else:
            if not self._buffers:
                self._hold(tuple(x.new_empty(*x.shape[:2], self.tokens, x.shape[3]) for x in pair))
            for buffer, x in zip(self._buffers, pair, strict=True):
                buffer[:, :, chunk.start : chunk.stop].copy_(x)

    def save(self, chunk: Chunk, pair: KVPair) -> None:
        """Keep the tensors of a chunk that is in the buffers elsewhere, too."""
        if chunk.index < self._num_resident:
            for sequence, x in zip(self._later, pair, strict=True):
                sequence.stash(chunk.index, dense(x))

    def restore(self) -> None:
        """Fill the buffers with what was saved, which stays saved."""
        order = range(self._num_resident)
        for i, *pair in zip(order, *(sequence.read(order) for sequence in self._later), strict=True):
            k, v = pair
            self.put(self._chunks[i], (k, v))

    def begin_sums(self, like: Iterable[Tensor], dtype: torch.dtype) -> None:
        """Have buffers of zeros, unless they are there."""
        if self.tokens and not self._buffers:
            self._hold(tuple(x.new_zeros(*x.shape[:2], self.tokens, x.shape[3], dtype=dtype) for x in like))

    def span(self, start: int, stop: int) -> KVPair:
        """Views of the buffers, (B, K, stop - start, D)."""
        a, b = (buffer[:, :, start:stop] for buffer in self._buffers)
        return a, b

    def read_later(self, order: Iterable[int], *, take: bool = False) -> None:
        """Say in which order `next_later` is to give the chunks that are not in the buffers."""
        self._readers = tuple(
            sequence.read(each, take=take) for sequence, each in zip(self._later, itertools.tee(order), strict=True)
        )

    def next_later(self) -> KVPair:
        """The next chunk's tensors."""
        a, b = read_next(self._readers)
        return a, b

    def drop(self, indices: Iterable[int]) -> None:
        """Hold chunks no longer that are not in the buffers; of those that are not here nothing."""
        for sequence in self._later:
            for index in indices:
                sequence.drop(index)

    def end_reading(self) -> None:
        """The tensors given last are no longer in use, and nothing more is read."""
        for reader in self._readers:
            reader.release()
        self._readers = ()

    def clear(self) -> None:
        """Hold nothing any longer."""
        self.end_reading()
        self.clear_buffers()
        for sequence in self._later:
            sequence.clear()

    def clear_buffers(self) -> None:
        """Hold what is elsewhere only."""
        for buffer, kind in zip(self._buffers, self._kinds, strict=False):
            self._stores.release("device", buffer.nbytes, kind)
        self._buffers = ()

    @property
    def later(self) -> tuple[ChunkedSequence, ...]:
        """Where the chunks are that are not in the buffers."""
        return self._later

    @property
    def nbytes(self) -> int:
        """Bytes held now, in whichever tier."""
        return sum(x.nbytes for x in self._buffers) + sum(x.nbytes for x in self._later)

    def _hold(self, buffers: tuple[Tensor, ...]) -> None:
        for buffer, kind in zip(buffers, self._kinds, strict=True):
            self._stores.acquire("device", buffer.nbytes, kind)
        self._buffers = buffers
