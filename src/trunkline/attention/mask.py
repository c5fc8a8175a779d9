"""Which keys each token sees, and in which kernel calls: documents, windows and attention chunks as rectangles.

A token sees keys from some first one up to itself. That first one is the start of its document, or of its attention
chunk, which is a document here; with a window it rises with the token. So what queries meet of a range of keys is made
of rectangles and triangles, and where a window is shorter than a chunk, of rows of equal triangles, which one call
takes side by side. What nobody sees is in none of them, and costs nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from torch import Tensor

Range = tuple[int, int]

_MOST_FOLDED = 8_192  # pieces in a call: the grid of a CUDA kernel ends at 65,535


class MaskBlock(NamedTuple):
    """Rows of a chunk, and keys that they meet in one kernel call.

    Attributes:
        rows: (start, stop) among the rows of the chunk that are here.
        keys: (start, stop), places in the sequence.
        shape: `full`: every row sees every key. `lower`: the last key is the last row's own, and each row before it
            sees one less (causal). `upper`: the first row sees all keys, and each row after it one less, from the left.
            Triangles have at least as many keys as rows.
        fold: rows and keys are cut into pieces of so many, and the first rows meet the first keys, the second the
            second; 0 where they are not cut.
    """

    rows: Range
    keys: Range
    shape: Literal["full", "lower", "upper"] = "full"
    fold: int = 0


@dataclass(frozen=True, slots=True)
class RowMask:
    """What the tokens of one row of a batch see.

    Attributes:
        starts: first tokens of documents, rising, the first of them 0.
        window: keys that a token sees at most, itself included; None for all of its document.
    """

    starts: tuple[int, ...] = (0,)
    window: int | None = None

    @property
    def is_causal(self) -> bool:
        """Whether every token sees all before it."""
        return self.starts == (0,) and self.window is None

    def first_key(self, token: int) -> int:
        """The first key that a token sees; never before that of an earlier token."""
        start = self.starts[bisect_right(self.starts, token) - 1]
        return start if self.window is None else max(start, token - self.window + 1)

    def num_pairs(self, seq_len: int) -> int:
        """Queries and keys that see each other in a sequence of so many tokens."""
        lengths = [stop - start for start, stop in pairwise([*self.starts, seq_len])]
        beyond = [0 if self.window is None else max(n - self.window, 0) for n in lengths]
        return sum(n * (n + 1) // 2 - b * (b + 1) // 2 for n, b in zip(lengths, beyond, strict=True))

    def blocks(self, tokens: Iterable[Range], keys: Range, *, joined: bool = False) -> list[MaskBlock]:
        """What rows meet of keys.

        Args:
            tokens: places in the sequence of the rows, which are numbered through.
            keys: places of keys: all before the rows of some range, or with these rows' own among them.
            joined: a triangle may have more keys than rows.
        """
        found: list[MaskBlock] = []
        offset = 0
        for start, stop in tokens:
            for block in self._of_range(start, stop, keys):
                rows = block.rows[0] - start + offset, block.rows[1] - start + offset
                found.append(block._replace(rows=rows))
            offset += stop - start
        return _merged(found, joined=joined)

    def _of_range(self, start: int, stop: int, keys: Range) -> Iterator[MaskBlock]:
        """Blocks of the tokens of one range, numbered by their places."""
        number = bisect_right(self.starts, start) - 1
        while number < len(self.starts) and self.starts[number] < stop:
            first = self.starts[number]
            end = self.starts[number + 1] if number + 1 < len(self.starts) else stop
            rows, seen = (max(start, first), min(stop, end)), (max(keys[0], first), min(keys[1], stop, end))
            if seen[0] < seen[1]:
                yield from self._before(rows, (seen[0], min(seen[1], rows[0])))
                if seen[1] > rows[0]:
                    assert seen[0] <= rows[0]
                    assert seen[1] == rows[1]
                    yield from self._own(rows)
            number += 1

    def _before(self, rows: Range, keys: Range) -> Iterator[MaskBlock]:
        """Of keys before all rows, in the same document."""
        (start, stop), (first, end) = rows, keys
        if first >= end:
            return
        if self.window is None:
            yield MaskBlock(rows, keys)
            return
        # From token `edge` on, each sees one key less; `last` sees none.
        edge, last = max(start, first + self.window - 1), min(stop, end + self.window - 1)
        if start < edge:
            yield MaskBlock((start, min(edge, stop)), keys)
        if edge < last:
            left = edge - self.window + 1
            middle = left + last - edge
            yield MaskBlock((edge, last), (left, middle), "upper")
            if middle < end:
                yield MaskBlock((edge, last), (middle, end))

    def _own(self, rows: Range) -> Iterator[MaskBlock]:
        """Of the rows' own keys."""
        start, stop = rows
        if self.window is None or stop - start <= self.window:
            yield MaskBlock(rows, rows, "lower")
            return
        piece = max(self.window - 1, 1)  # as many keys as the last token of a piece sees of the piece before
        count = (stop - start) // piece
        whole = start + count * piece
        for at in range(start, whole, _MOST_FOLDED * piece):
            stop_at = min(at + _MOST_FOLDED * piece, whole)
            yield MaskBlock((at, stop_at), (at, stop_at), "lower", piece)
            first = max(at, start + piece)
            if self.window > 1 and first < stop_at:
                yield MaskBlock((first, stop_at), (first - piece, stop_at - piece), "upper", piece)
        if whole < stop:
            yield MaskBlock((whole, stop), (whole, stop), "lower")
            yield from self._before((whole, stop), (whole - piece, whole))


PLAIN = (RowMask(),)


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """How far back a layer's attention goes within a document, whatever the sequence.

    Attributes:
        window: keys that a token sees at most, itself included; None for all.
        chunk: documents are cut into parts of so many tokens that do not see each other (Llama 4); None for none.
    """

    window: int | None = None
    chunk: int | None = None

    def visible(self, q: Tensor, kv: Tensor) -> Tensor:
        """Whether queries see keys, given the places of both in their document; they broadcast."""
        seen = kv <= q
        if self.window is not None:
            seen = seen & (kv > q - self.window)
        return seen if self.chunk is None else seen & (kv // self.chunk == q // self.chunk)

    def row_masks(self, documents: Sequence[Sequence[int]], seq_len: int) -> tuple[RowMask, ...]:
        """What tokens see, of each row of a batch, or of all alike.

        Args:
            documents: first tokens of documents, of each row.
            seq_len: tokens of a row. What reaches as far has no limit.
        """
        found = []
        for starts in documents:
            lengths = [stop - start for start, stop in pairwise([*starts, seq_len])]
            longest = max(lengths)
            if self.chunk is not None and self.chunk < longest:
                parts = zip(starts, lengths, strict=True)
                starts = [at for start, n in parts for at in range(start, start + n, self.chunk)]
                longest = self.chunk
            window = self.window if self.window is not None and self.window < longest else None
            found.append(RowMask(tuple(starts), window))
        return tuple(found)


def _merged(blocks: list[MaskBlock], *, joined: bool) -> list[MaskBlock]:
    """Fewer calls for the same: rectangles with the same keys, and, if allowed, a triangle with its rectangle."""
    found: list[MaskBlock] = []
    for block in blocks:
        before = found[-1] if found else None
        if before is None or before.fold or block.fold:
            found.append(block)
        elif before.keys == block.keys and before.shape == block.shape == "full" and before.rows[1] == block.rows[0]:
            found[-1] = before._replace(rows=(before.rows[0], block.rows[1]))
        elif (
            joined
            and before.rows == block.rows
            and before.keys[1] == block.keys[0]
            and ((before.shape, block.shape) in (("full", "lower"), ("upper", "full")))
        ):
            shape = block.shape if block.shape == "lower" else before.shape
            found[-1] = before._replace(keys=(before.keys[0], block.keys[1]), shape=shape)
        else:
            found.append(block)
    return found
