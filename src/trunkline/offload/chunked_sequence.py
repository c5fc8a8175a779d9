"""Chunked sequences: one tensor per chunk, on the device or offloaded, with prefetch.

The engine's sweeps move whole activations of a layer (inputs, outputs, gradients) through these, and attention its
keys, values and outputs. The order of reads is known beforehand, so that a `Reader` fetches the next chunks while one
is in use.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trunkline.offload.lanes.base import Move

if TYPE_CHECKING:
    from trunkline.offload.storage import StorageBlock
    from trunkline.offload.stores import Stores


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Shape, strides, dtype and device of a dense tensor."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        """Return the spec of a tensor."""
        return TensorSpec(x.shape, x.stride(), x.dtype, x.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the elements."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """Allocate a tensor of this spec, uninitialised."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Offloaded:
    """Offloaded chunk: the spec of its tensor, its block, and the move that fills or filled the block."""

    spec: TensorSpec
    block: StorageBlock
    stash: Move


class ChunkedSequence:
    """Activation of this rank's tokens of a sequence, as a list of chunks.

    Args:
        num_chunks: chunks of the sequence.
        stores: stores of the step, which place its chunks and count its bytes.
        name: name of the store, as in the placement. One sequence after another may use a store.
        num_slots: chunks that the store has room for; chunk i uses slot i % `num_slots`. None for a slot per chunk.
    """

    def __init__(self, num_chunks: int, stores: Stores, name: str, num_slots: int | None = None) -> None:
        self._chunks: list[Tensor | _Offloaded | None] = [None] * num_chunks
        self._stores = stores
        self._name = name
        self._num_slots = num_chunks if num_slots is None else num_slots
        self._blocks: list[StorageBlock | None] = []

    def stash(self, index: int, x_BCE: Tensor) -> None:
        """Store chunk `index` where the placement says; its slot must be free.

        On the device the tensor itself is kept. Otherwise its copy to another tier is started; this may wait for
        earlier copies.

        Args:
            index: index of the chunk.
            x_BCE: tensor of any shape. The caller must not change it in place afterwards.

        Raises:
            ValueError: the chunk is larger than its place.
            TierError: an earlier copy failed.
        """
        slot = index % self._num_slots
        assert not any(x is not None for x in self._chunks[slot :: self._num_slots]), f"no free slot for chunk {index}"
        if not self._blocks:
            self._blocks = self._stores.blocks(self._name, len(self._chunks))
        block = self._blocks[slot]
        if block is None:
            self._stores.acquire("device", x_BCE.nbytes, self.kind)
            self._chunks[index] = x_BCE
            return
        x_BCE = dense(x_BCE)
        move = self._stores.stash(self.kind, x_BCE, block)
        self._chunks[index] = _Offloaded(TensorSpec.of(x_BCE), block, move)

    def read(self, order: Iterable[int], *, take: bool = False) -> Reader:
        """Return a reader of chunks in the given order; with `take` each is removed from the sequence as it is read."""
        return Reader(((self, index) for index in order), take=take)

    def clear(self) -> None:
        """Remove all chunks."""
        for index in range(len(self._chunks)):
            self.drop(index)

    def drop(self, index: int) -> None:
        """Remove a chunk, if it is stored. If its stash is still pending, the lane completes it."""
        x = self._chunks[index]
        if isinstance(x, _Offloaded):
            self._stores.release(x.block.tier, x.spec.nbytes, self.kind)
        elif x is not None:
            self._stores.release("device", x.nbytes, self.kind)
        self._chunks[index] = None

    @property
    def kind(self) -> str:
        """First word of the store's name. Only one layer at a time writes stores of one kind."""
        return self._name.split()[0]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the stored chunks; at least one must be stored."""
        return next(x.spec.dtype if isinstance(x, _Offloaded) else x.dtype for x in self._chunks if x is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored chunks, in any tier."""
        return sum(x.spec.nbytes if isinstance(x, _Offloaded) else x.nbytes for x in self._chunks if x is not None)


_LOOKAHEAD = 32  # chunks a reader looks ahead: past those on the device, to the first offloaded ones


class Reader:
    """Reader of chunks in a known order, from one sequence (`ChunkedSequence.read`) or several, with prefetch.

    With `prefetch` p, up to p fetched chunks are on the device, in use or in flight. One more may be: the chunk handed
    out before, which the caller may still use. Prefetch stops at a chunk that is not stored yet.

    Args:
        order: pairs of a sequence and the index of a chunk.
        take: remove each chunk from its sequence as it is read.
        prefetch: replaces the setting of the sequence's stores; None keeps it.
    """

    def __init__(
        self, order: Iterable[tuple[ChunkedSequence, int]], *, take: bool = False, prefetch: int | None = None
    ) -> None:
        self._order = iter(order)
        self._upcoming = next(self._order, None)  # the next chunk to issue
        self._take = take
        self._prefetch = prefetch
        # Issued and not yet handed out; the move is None for a chunk on the device.
        self._issued: deque[tuple[ChunkedSequence, int, Move | None]] = deque()
        # Stores and device bytes of the last two chunks handed out, which the caller may still use.
        self._in_use: deque[tuple[Stores, int]] = deque()

    def __iter__(self) -> Iterator[Tensor]:
        """Yield all chunks in order; release the chunks handed out at the end, or when the loop is left early."""
        try:
            while self._issued or self._upcoming is not None:
                yield self.next()
        finally:
            self.release()

    def next(self) -> Tensor:
        """Return the next chunk. Of the chunks returned before, the caller may still use the last one only.

        Raises:
            TierError: its fetch failed.
        """
        (x,) = read_next((self,))
        return x

    def release(self) -> None:
        """Release all chunks handed out; the caller must not use them afterwards."""
        while self._in_use:
            self._release_oldest()

    def cancel(self) -> None:
        """Release the chunks handed out, and end the reading: wait for the fetches in flight and drop their results.

        A failed fetch is ignored.
        """
        self.release()
        self._upcoming = None
        while self._issued:
            sequence, _, move = self._issued.popleft()
            if move is not None:
                sequence._stores.release("device", move.nbytes)
                with contextlib.suppress(RuntimeError):  # the first failed move has been reported already
                    sequence._stores.lanes.finish(move)

    def _release_oldest(self) -> None:
        stores, nbytes = self._in_use.popleft()
        stores.release("device", nbytes)

    def _begin(self) -> None:
        """Release all chunks handed out but the last, and make sure that the next one is issued, if it is stored."""
        while len(self._in_use) > 1:
            self._release_oldest()
        if not self._issued:
            self._issue()

    def _hand_out(self) -> Tensor:
        sequence, index, move = self._issued[0]
        stores = sequence._stores
        if move is None:
            x = sequence._chunks[index]
            assert isinstance(x, Tensor), f"chunk {index} is not stored"
            if self._take:
                sequence._chunks[index] = None
                stores.release("device", x.nbytes, sequence.kind)
            self._in_use.append((stores, 0))
        else:
            assert move.tensor is not None
            x = move.tensor
            stores.lanes.finish(move)  # before `popleft`: if it raises, `cancel` still finds the move and its bytes
            self._in_use.append((stores, x.nbytes))
            if self._take:
                stores.release(move.block.tier, x.nbytes, sequence.kind)
        self._issued.popleft()
        return x

    def _prefetch_one(self) -> bool:
        """Issue one more chunk if the prefetch depth allows; return whether it did."""
        if self._upcoming is None or len(self._issued) >= _LOOKAHEAD:
            return False
        in_flight = sum(move is not None for _, _, move in self._issued)
        # One of `prefetch` is in use by the caller.
        return in_flight < (self._prefetch or self._upcoming[0]._stores.prefetch) - 1 and self._issue()

    def _issue(self) -> bool:
        """Queue the next chunk, and start its fetch if it is offloaded; return False if there is none, or not yet."""
        if self._upcoming is None:
            return False
        sequence, index = self._upcoming
        stores, x = sequence._stores, sequence._chunks[index]
        if x is None:  # taken, and not stashed again: somebody still works on it
            return False
        self._upcoming = next(self._order, None)
        if isinstance(x, Tensor):
            self._issued.append((sequence, index, None))
            return True
        into = x.spec.empty()
        stores.acquire("device", into.nbytes)
        self._issued.append((sequence, index, stores.lanes.fetch(x.block, into, x.stash)))
        if self._take:
            # Its bytes in the tier count until `_hand_out`: the fetch still reads the block.
            sequence._chunks[index] = None
        return True


def read_next(readers: Sequence[Reader]) -> list[Tensor]:
    """Return the next chunk of each reader, as `Reader.next` does, with the same errors.

    All readers issue their next chunk before any prefetches a later one, and they prefetch in turn: K0, V0, K1, V1.
    A lane runs moves in order. With K0, K1, V0, V1 compute would wait for K1 before it could use V0.
    """
    for reader in readers:
        reader._begin()
    chunks = [reader._hand_out() for reader in readers]
    prefetch_more(readers)
    return chunks


def prefetch_more(readers: Sequence[Reader]) -> None:
    """Issue chunks of each reader in turn, until every reader is at its prefetch depth or at a chunk not stored yet."""
    more = True
    while more:
        more = False
        for reader in readers:
            more |= reader._prefetch_one()


def dense(x: Tensor) -> Tensor:
    """Return `x` if its elements fill one range of memory, in any order of dims; otherwise a contiguous copy."""
    dims = sorted(range(x.ndim), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
    return x if x.permute(dims).is_contiguous() else x.contiguous()
