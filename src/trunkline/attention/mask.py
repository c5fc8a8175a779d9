"""Row masks: which keys each token sees, cut into rectangles and triangles that kernels compute.

A token sees the keys from some first one up to itself. The first one is the start of its document (an attention chunk
of Llama 4 counts as a document); with a sliding window it also rises with the token. So the visible part of a range of
keys is made of rectangles and triangles. Where a window is shorter than a chunk it is made of rows of equal triangles,
which one kernel call takes as a batch of tiles. Keys that no query sees are in no block, and cost nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor

Range = tuple[int, int]

_MAX_TILES = 8_192  # in one call: the grid of a CUDA kernel ends at 65,535


class MaskBlock(NamedTuple):
    """Query rows and keys of one kernel call.

    Attributes:
        rows: (start, stop) among this rank's query rows of a chunk, from 0.
        keys: (start, stop), positions in the whole sequence.
        shape: `full`: every row sees every key. `lower`: the last row sees all keys, each row before it one less at
            the end (causal). `upper`: the first row sees all keys, each row after it one less at the beginning.
            Triangles have at least as many keys as rows.
        tile: rows and keys are cut into tiles of this length, and tile i of the rows sees tile i of the keys alone;
            0 where they are not cut.
    """

    rows: Range
    keys: Range
    shape: Literal["full", "lower", "upper"] = "full"
    tile: int = 0


@dataclass(frozen=True, slots=True)
class RowMask:
    """Mask of one row of a batch.

    Attributes:
        starts: positions of the first tokens of documents (or attention chunks), rising, the first of them 0.
        window: most keys that a token sees, itself included; None for all of its document.
    """

    starts: tuple[int, ...] = (0,)
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """True if every token sees all tokens before it: one document, and no window."""
        return self.starts == (0,) and self.window is None

    def first_key(self, token: int) -> int:
        """Return the position of the first key that a token sees. It never falls from one token to the next."""
        start = self.starts[bisect_right(self.starts, token) - 1]
        return start if self.window is None else max(start, token - self.window + 1)

    def num_pairs(self, seq_len: int) -> int:
        """Count the query/key pairs that see each other in a sequence of `seq_len` tokens."""
        lengths = [stop - start for start, stop in pairwise([*self.starts, seq_len])]
        beyond = [0 if self.window is None else max(n - self.window, 0) for n in lengths]
        return sum(n * (n + 1) // 2 - b * (b + 1) // 2 for n, b in zip(lengths, beyond, strict=True))

    def blocks(self, queries: Iterable[Range], keys: Range, *, bottom_right: bool = False) -> list[MaskBlock]:
        """Cut the visible part of a range of keys into blocks.

        Args:
            queries: position ranges of the query rows; rows are numbered through these ranges in order.
            keys: position range of the keys. For each query range it must lie before the range, lie after it, or begin
                no later and end no sooner than the range does.
            bottom_right: allow triangles with more keys than rows (causal, aligned to the bottom right).

        Returns:
            Blocks that together hold every visible pair once.
        """
        blocks: list[MaskBlock] = []
        offset = 0
        for start, stop in queries:
            for block in self._of_range(start, stop, keys):
                rows = block.rows[0] - start + offset, block.rows[1] - start + offset
                blocks.append(block._replace(rows=rows))
            offset += stop - start
        return _merge_blocks(blocks, bottom_right=bottom_right)

    def _of_range(self, start: int, stop: int, keys: Range) -> Iterator[MaskBlock]:
        """Yield the blocks of one query range, document by document; rows are given by position."""
        number = bisect_right(self.starts, start) - 1
        while number < len(self.starts) and self.starts[number] < stop:
            first = self.starts[number]
            end = self.starts[number + 1] if number + 1 < len(self.starts) else stop
            rows, seen = (max(start, first), min(stop, end)), (max(keys[0], first), min(keys[1], stop, end))
            if seen[0] < seen[1]:
                yield from self._earlier_keys(rows, (seen[0], min(seen[1], rows[0])))
                if seen[1] > rows[0]:
                    assert seen[0] <= rows[0]
                    assert seen[1] == rows[1]
                    yield from self._own_keys(rows)
            number += 1

    def _earlier_keys(self, rows: Range, keys: Range) -> Iterator[MaskBlock]:
        """Yield the blocks of keys that lie before all rows, in the same document."""
        (start, stop), (first, end) = rows, keys
        if first >= end:
            return
        if self.window is None:
            yield MaskBlock(rows, keys)
            return
        # From token `edge` on, each token sees one key less than the one before; token `last` sees none.
        edge, last = max(start, first + self.window - 1), min(stop, end + self.window - 1)
        if start < edge:
            yield MaskBlock((start, min(edge, stop)), keys)
        if edge < last:
            left = edge - self.window + 1
            middle = left + last - edge
            yield MaskBlock((edge, last), (left, middle), "upper")
            if middle < end:
                yield MaskBlock((edge, last), (middle, end))

    def _own_keys(self, rows: Range) -> Iterator[MaskBlock]:
        """Yield the blocks of the rows' own keys."""
        start, stop = rows
        if self.window is None or stop - start <= self.window:
            yield MaskBlock(rows, rows, "lower")
            return
        # Tiles of window - 1 tokens. Within its own tile a token sees the keys up to itself: a `lower` triangle. Of the
        # tile before, the first token sees all keys, each later token one key less: an `upper` triangle.
        tile = max(self.window - 1, 1)
        count = (stop - start) // tile
        tiled = start + count * tile
        for at in range(start, tiled, _MAX_TILES * tile):
            stop_at = min(at + _MAX_TILES * tile, tiled)
            yield MaskBlock((at, stop_at), (at, stop_at), "lower", tile)
            first = max(at, start + tile)
            if self.window > 1 and first < stop_at:
                yield MaskBlock((first, stop_at), (first - tile, stop_at - tile), "upper", tile)
        if tiled < stop:
            yield MaskBlock((tiled, stop), (tiled, stop), "lower")
            yield from self._earlier_keys((tiled, stop), (tiled - tile, tiled))


CAUSAL = (RowMask(),)


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Limits of a layer's attention within a document: a sliding window, attention chunks, or neither.

    Attributes:
        window: most keys that a token sees, itself included; None for all.
        chunk: documents are cut into attention chunks of this length, which do not see each other (Llama 4); None for
            none.
    """

    window: int | None = None
    chunk: int | None = None

    def visible(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return True where a query sees a key, given positions of both in their document; shapes broadcast."""
        seen = kv <= q
        if self.window is not None:
            seen = seen & (kv > q - self.window)
        return seen if self.chunk is None else seen & (kv // self.chunk == q // self.chunk)

    def row_masks(self, documents: Sequence[Sequence[int]], seq_len: int) -> tuple[RowMask, ...]:
        """Build the masks of a batch. A window or attention chunk at least as long as a row's documents is left out.

        Args:
            documents: for each row, the positions of the first tokens of its documents; one entry may stand for all.
            seq_len: tokens of a row, on all ranks.

        Returns:
            One mask for each entry of `documents`.
        """
        masks = []
        for starts in documents:
            lengths = [stop - start for start, stop in pairwise([*starts, seq_len])]
            longest = max(lengths)
            if self.chunk is not None and self.chunk < longest:
                parts = zip(starts, lengths, strict=True)
                starts = [at for start, n in parts for at in range(start, start + n, self.chunk)]
                longest = self.chunk
            window = self.window if self.window is not None and self.window < longest else None
            masks.append(RowMask(tuple(starts), window))
        return tuple(masks)


def _merge_blocks(blocks: list[MaskBlock], *, bottom_right: bool) -> list[MaskBlock]:
    """Merge neighbouring blocks into fewer calls: rectangles over the same keys; a triangle with its rectangle."""
    merged: list[MaskBlock] = []
    for block in blocks:
        before = merged[-1] if merged else None
        if before is None or before.tile or block.tile:
            merged.append(block)
        elif before.keys == block.keys and before.shape == block.shape == "full" and before.rows[1] == block.rows[0]:
            merged[-1] = before._replace(rows=(before.rows[0], block.rows[1]))
        elif (
            bottom_right
            and before.rows == block.rows
            and before.keys[1] == block.keys[0]
            and ((before.shape, block.shape) in (("full", "lower"), ("upper", "full")))
        ):
            shape = block.shape if block.shape == "lower" else before.shape
            merged[-1] = before._replace(keys=(before.keys[0], block.keys[1]), shape=shape)
        else:
            merged.append(block)
    return merged
