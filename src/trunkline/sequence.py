"""A sequence held in chunks: one tensor a chunk, handed out and taken back one at a time.

The sweeps of the engine move whole activations of a layer (inputs, outputs, gradients) through these. A chunk that has
been taken out is no longer held here, so that a sweep frees its input as it goes.
"""

from __future__ import annotations

from torch import Tensor


class ChunkedSequence:
    """An activation of S tokens as a list of chunks, each (B, C, E), resting on the device.

    Args:
        num_chunks: how many chunks the sequence has.
    """

    def __init__(self, num_chunks: int) -> None:
        self._chunks: list[Tensor | None] = [None] * num_chunks

    def stash(self, index: int, x_BCE: Tensor) -> None:
        """Put chunk `index` here. It must not be changed in place afterwards."""
        self._chunks[index] = x_BCE

    def fetch(self, index: int) -> Tensor:
        """Give chunk `index` and keep it."""
        x_BCE = self._chunks[index]
        assert x_BCE is not None, f"chunk {index} was never stashed or already taken"
        return x_BCE

    def take(self, index: int) -> Tensor:
        """Give chunk `index` and hold it no longer."""
        x_BCE = self.fetch(index)
        self._chunks[index] = None
        return x_BCE

    @property
    def nbytes(self) -> int:
        """Bytes of the chunks held now."""
        return sum(x.nbytes for x in self._chunks if x is not None)
