"""Schedule of a layer: which chunks of keys each chunk of queries sees, and when a chunk of keys is seen last."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from trunkline.attention.mask import Range, RowMask
from trunkline.chunking import Chunk, zigzag


class ChunkSchedule:
    """Visibility between the chunks of a sequence, derived from its row masks.

    Args:
        chunks: this rank's query rows of each chunk, numbered from 0 on this rank.
        row_masks: mask of each row of the batch, or one for all rows.
        rank: index of this rank among those that the query rows of a chunk are cut over (`cp`).
        size: number of these ranks.

    Attributes:
        row_masks: as given.
        starts: for each chunk, the position of its first token, among the tokens of all ranks.
        first_keys: for each chunk, the position of the first key that any of its tokens sees in any row of the batch.
        is_causal: every token of every row sees all tokens before it.
        has_window: a row has a sliding window, so that keys and values can be dropped after their last use.
        num_live_chunks: most chunks whose keys and values are held at a time; all of them without a window.
    """

    def __init__(self, chunks: Sequence[Chunk], row_masks: Sequence[RowMask], rank: int, size: int) -> None:
        over_ranks = [Chunk(chunk.index, chunk.start * size, chunk.stop * size) for chunk in chunks]
        self.row_masks = row_masks
        self.starts = [chunk.start for chunk in over_ranks]
        self.first_keys = [min(mask.first_key(start) for mask in row_masks) for start in self.starts]
        self.is_causal = all(mask.is_causal for mask in row_masks)
        self.has_window = any(mask.window is not None for mask in row_masks)
        self._first_chunks = [bisect_right(self.starts, key) - 1 for key in self.first_keys]
        self._queries = [zigzag(chunk, rank, size).ranges for chunk in over_ranks]
        most = max(chunk.index - self._first_chunks[chunk.index] + 1 for chunk in chunks)
        # Where ranks gather keys, the first span of the next chunk is sent for before this chunk is done.
        self.num_live_chunks = min(most + (size > 1), len(chunks)) if self.has_window else len(chunks)

    def queries(self, chunk: Chunk) -> Sequence[Range]:
        """Return the position ranges of this rank's rows of a chunk: one, or two over several ranks."""
        return self._queries[chunk.index]

    def earlier(self, chunk: Chunk) -> range:
        """Return the indices of the chunks before this one that it sees."""
        return range(self._first_chunks[chunk.index], chunk.index)

    def is_used_after(self, chunk: Chunk, index: int) -> bool:
        """Return True if a chunk after this one sees chunk `index`, which is this one or an earlier one."""
        return chunk.index + 1 < len(self._first_chunks) and self._first_chunks[chunk.index + 1] <= index

    def last_used_by(self, chunk: Chunk) -> range:
        """Return the indices of the key chunks whose last user is this chunk of queries."""
        following = chunk.index + 1
        first = self._first_chunks
        return range(first[chunk.index], first[following] if following < len(first) else following)
