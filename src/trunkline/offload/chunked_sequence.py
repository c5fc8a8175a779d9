"""A sequence held in chunks: one tensor a chunk, handed out and taken back one at a time, wherever each of them rests.

The sweeps of the engine move whole activations of a layer (inputs, outputs, gradients) through these, the core its
keys, values and outputs. What is read next is known, so a `Reader` has the next chunks fetched while one is in use.
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
    """What a dense tensor is apart from its contents."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(x: Tensor) -> TensorSpec:
        """That of a tensor."""
        return TensorSpec(x.shape, x.stride(), x.dtype, x.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the contents."""
        return self.shape.numel() * self.dtype.itemsize

    def empty(self) -> Tensor:
        """A tensor of this form."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class _Offloaded:
    """A chunk beyond the device: its form there, and the move that brings or brought it."""

    form: TensorSpec
    block: StorageBlock
    stash: Move


class ChunkedSequence:
    """An activation of S tokens as a list of chunks.

    Args:
        num_chunks: how many chunks the sequence has.
        stores: the run's, which count its bytes.
        name: of the store, as it was placed; a store may serve one sequence after another.
        num_places: of the store, that chunks take turns in: so many are here at a time; None for one of each chunk.
    """

    def __init__(self, num_chunks: int, stores: Stores, name: str, num_slots: int | None = None) -> None:
        self._chunks: list[Tensor | _Offloaded | None] = [None] * num_chunks
        self._stores = stores
        self._name = name
        self._num_places = num_chunks if num_slots is None else num_slots
        self._blocks: list[StorageBlock | None] = []

    def stash(self, index: int, x_BCE: Tensor) -> None:
        """Put chunk `index` here. It must not be changed in place afterwards."""
        place = index % self._num_places
        assert not any(x is not None for x in self._chunks[place :: self._num_places]), f"no place for chunk {index}"
        if not self._blocks:
            self._blocks = self._stores.blocks(self._name, len(self._chunks))
        block = self._blocks[place]
        if block is None:
            self._stores.acquire("device", x_BCE.nbytes, self.kind)
            self._chunks[index] = x_BCE
            return
        x_BCE = dense(x_BCE)
        move = self._stores.stash(self.kind, x_BCE, block)
        self._chunks[index] = _Offloaded(TensorSpec.of(x_BCE), block, move)

    def read(self, order: Iterable[int], *, take: bool = False) -> Reader:
        """Chunks in the order in which they will be wanted; with `take` they are held here no longer."""
        return Reader(((self, index) for index in order), take=take)

    def clear(self) -> None:
        """Hold nothing any longer."""
        for index in range(len(self._chunks)):
            self.drop(index)

    def drop(self, index: int) -> None:
        """Hold a chunk no longer, if it is here."""
        x = self._chunks[index]
        if isinstance(x, _Offloaded):
            self._stores.release(x.block.tier, x.form.nbytes, self.kind)
        elif x is not None:
            self._stores.release("device", x.nbytes, self.kind)
        self._chunks[index] = None

    @property
    def kind(self) -> str:
        """The first word of the store's name: stores of one kind are written by one layer at a time."""
        return self._name.split()[0]

    @property
    def dtype(self) -> torch.dtype:
        """Of the chunks held now."""
        return next(x.form.dtype if isinstance(x, _Offloaded) else x.dtype for x in self._chunks if x is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks held now, in whichever tier."""
        return sum(x.form.nbytes if isinstance(x, _Offloaded) else x.nbytes for x in self._chunks if x is not None)


_FAR = 32  # chunks that a reader looks ahead: past those on the device, to have fetched what lies behind them


class Reader:
    """Hands out chunks in an order given beforehand, of one sequence (`ChunkedSequence.read`) or of several.

    With `prefetch` p, up to p fetched chunks are in use or on their way, and one more: the one handed out before, which
    its user lets go only when it takes the next, or works on side by side with it.

    Args:
        order: sequences, and which chunk of each.
        take: they are held there no longer once they are handed out.
        prefetch: what takes the place of that of their stores; None for theirs.
    """

    def __init__(
        self, order: Iterable[tuple[ChunkedSequence, int]], *, take: bool = False, prefetch: int | None = None
    ) -> None:
        self._order = iter(order)
        self._upcoming = next(self._order, None)
        self._take = take
        self._prefetch = prefetch
        self._coming: deque[tuple[ChunkedSequence, int, Move | None]] = deque()
        # The chunks handed out, the last two at most: their stores, and their bytes on the device.
        self._out: deque[tuple[Stores, int]] = deque()

    def __iter__(self) -> Iterator[Tensor]:
        """All of them."""
        try:
            while self._coming or self._upcoming is not None:
                yield self.next()
        finally:
            self.release()

    def next(self) -> Tensor:
        """The next chunk. Of those handed out earlier the last alone may be in use still."""
        (x,) = read_next((self,))
        return x

    def _begin(self) -> None:
        while len(self._out) > 1:
            self._let_go()
        if not self._coming:
            self._issue()

    def _hand_out(self) -> Tensor:
        sequence, index, move = self._coming[0]
        stores = sequence._stores
        if move is None:
            x = sequence._chunks[index]
            assert isinstance(x, Tensor), f"chunk {index} is not here"
            if self._take:
                sequence._chunks[index] = None
                stores.release("device", x.nbytes, sequence.kind)
            self._out.append((stores, 0))
        else:
            assert move.tensor is not None
            x = move.tensor
            stores.lanes.finish(move)  # if it failed it is still among what is to be given back
            self._out.append((stores, x.nbytes))
            if self._take:
                stores.release(move.block.tier, x.nbytes, sequence.kind)
        self._coming.popleft()
        return x

    def _look_ahead(self) -> bool:
        """Have one more fetched, if there is room for it on the device."""
        if self._upcoming is None or len(self._coming) >= _FAR:
            return False
        under_way = sum(move is not None for _, _, move in self._coming)
        return under_way < (self._prefetch or self._upcoming[0]._stores.prefetch) - 1 and self._issue()

    def release(self) -> None:
        """No chunk handed out is in use any longer."""
        while self._out:
            self._let_go()

    def cancel(self) -> None:
        """The same, and what is on its way is not wanted any more."""
        self.release()
        self._upcoming = None
        while self._coming:
            sequence, _, move = self._coming.popleft()
            if move is not None:
                sequence._stores.release("device", move.nbytes)
                with contextlib.suppress(RuntimeError):  # whoever waited for the first has been told
                    sequence._stores.lanes.finish(move)

    def _let_go(self) -> None:
        stores, nbytes = self._out.popleft()
        stores.release("device", nbytes)

    def _issue(self) -> bool:
        """Have the next chunk fetched, if it is there to be fetched."""
        if self._upcoming is None:
            return False
        sequence, index = self._upcoming
        stores, x = sequence._stores, sequence._chunks[index]
        if x is None:
            return False
        self._upcoming = next(self._order, None)
        if isinstance(x, Tensor):
            self._coming.append((sequence, index, None))
            return True
        into = x.form.empty()
        stores.acquire("device", into.nbytes)
        self._coming.append((sequence, index, stores.lanes.fetch(x.block, into, x.stash)))
        if self._take:
            sequence._chunks[index] = None
        return True


def read_next(readers: Sequence[Reader]) -> list[Tensor]:
    """The next chunk of each reader, see `Reader.next`: fetched in turn, so that what is wanted first comes first."""
    for reader in readers:
        reader._begin()
    found = [reader._hand_out() for reader in readers]
    prefetch_more(readers)
    return found


def prefetch_more(readers: Sequence[Reader]) -> None:
    """Have as much fetched as there is room for on the device, in turn."""
    more = True
    while more:
        more = False
        for reader in readers:
            more |= reader._look_ahead()


def dense(x: Tensor) -> Tensor:
    """`x` with its elements one after another in memory, in whatever order of dims; a copy only where it is not so."""
    dims = sorted(range(x.ndim), key=lambda dim: (x.stride(dim), x.shape[dim]), reverse=True)
    return x if x.permute(dims).is_contiguous() else x.contiguous()
