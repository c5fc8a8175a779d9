"""Which chunks of keys each chunk of queries meets at all, and in which blocks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from trunkline.attention.mask import MaskBlock, RowMask
from trunkline.chunking import Chunk, zigzag


class ChunkSchedule:
    """Which chunks of keys each chunk of queries meets, of what tokens see.

    Args:
        chunks: this rank's rows of each chunk, in their own numbering.
        sight: what tokens see, of each row of the batch, or one for all rows.
        rank: this one, of those that the rows of a chunk are cut over.
        size: how many these are.

    Attributes:
        starts: the place in the sequence of the first token of each chunk.
        first_keys: that of the first key that any of them sees.
        is_causal: whether every token sees all before it.
        has_window: whether a window passes chunks that no later one meets: their keys and values can be let go.
        num_live_chunks: chunks whose keys and values are held at a time, at most.
    """

    def __init__(self, chunks: Sequence[Chunk], sight: Sequence[RowMask], rank: int, size: int) -> None:
        whole = [Chunk(chunk.index, chunk.start * size, chunk.stop * size) for chunk in chunks]
        self.starts = [chunk.start for chunk in whole]
        self.first_keys = [min(each.first_key(start) for each in sight) for start in self.starts]
        self.is_causal = all(each.is_causal for each in sight)
        self._first = [bisect_right(self.starts, key) - 1 for key in self.first_keys]  # chunks
        self._tokens = [zigzag(chunk, rank, size).ranges for chunk in whole]
        self._sight = sight
        self.has_window = any(each.window is not None for each in sight)
        most = max(chunk.index - self._first[chunk.index] + 1 for chunk in chunks)
        # Where ranks hold parts, the first that the next chunk meets are sent for before this one is done.
        self.num_live_chunks = min(most + (size > 1), len(chunks)) if self.has_window else len(chunks)

    def before(self, chunk: Chunk) -> range:
        """The chunks that one meets besides itself."""
        return range(self._first[chunk.index], chunk.index)

    def is_met_after(self, chunk: Chunk, index: int) -> bool:
        """Whether a chunk after this one meets chunk `index`, which is this one or before it."""
        return chunk.index + 1 < len(self._first) and self._first[chunk.index + 1] <= index

    def passed(self, chunk: Chunk) -> range:
        """The chunks that this one meets and no later one does."""
        following = chunk.index + 1
        return range(self._first[chunk.index], self._first[following] if following < len(self._first) else following)

    def blocks(self, chunk: Chunk, first: int, count: int, *, joined: bool) -> Iterator[tuple[int, MaskBlock]]:
        """What a chunk meets of keys: rows of the batch (0 where one stands for all), with blocks.

        Args:
            chunk: which.
            first: place in the sequence of the first key.
            count: how many keys, in the order of the sequence.
            joined: a triangle may have more keys than rows.
        """
        for row, each in enumerate(self._sight):
            for block in each.blocks(self._tokens[chunk.index], (first, first + count), joined=joined):
                yield row, block
