"""Boundaries of chunks.

A chunk is `chunk_size` consecutive tokens of the *global* sequence (of all ranks that share it), and the unit of all
work. No length has to divide another: the last chunk has the remaining tokens, and padding where ranks share it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk of a sequence, tokens `start … stop - 1`, or one rank's part of it.

    Tokens are numbered in the whole sequence, except in a rank's query rows (`Ranks.query_rows`). `len` is the number
    of tokens, without the gap.

    Attributes:
        index: number of the chunk, from 0.
        start: first token.
        stop: token after the last.
        gap: tokens `gap[0] … gap[1] - 1` between them belong to other ranks; None for no gap.
    """

    index: int
    start: int
    stop: int
    gap: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.gap is None else self.stop - self.gap[1] + self.gap[0] - self.start

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """Ranges (start, stop) of consecutive tokens: one, or two around the gap."""
        return ((self.start, self.stop),) if self.gap is None else ((self.start, self.gap[0]), (self.gap[1], self.stop))


def split(seq_len: int, chunk_size: int) -> list[Chunk]:
    """Cut a sequence into chunks.

    Args:
        seq_len: tokens in the sequence, at least 1.
        chunk_size: tokens in a chunk, at least 1; larger than `seq_len` gives one chunk.

    Returns:
        The chunks in order; all but the last have `chunk_size` tokens.

    Raises:
        ValueError: a number is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give a positive number of tokens, or 'auto'.")
    if seq_len < 1:
        raise ValueError("input_ids has no tokens: give at least one token a row.")
    starts = range(0, seq_len, chunk_size)
    return [Chunk(i, start, min(start + chunk_size, seq_len)) for i, start in enumerate(starts)]


def zigzag(chunk: Chunk, rank: int, size: int, part: int = 0, parts: int = 1) -> Chunk:
    """Return a rank's tokens of a chunk, such that causal attention is equal work for all ranks.

    The chunk is cut into `2 * size` slices; rank r has slice r and slice `2 * size - 1 - r`. A single rank has the
    whole chunk. Either may be cut once more, into `parts`.

    Args:
        chunk: a chunk; its length is a multiple of `2 * size` and of `size * parts` (of `parts` alone for one rank).
        rank: the rank.
        size: number of ranks.
        part: which of `parts` equal parts of the rank's tokens, in order.
        parts: number of parts.
    """
    own = len(chunk) // (size * parts)
    if size == 1:
        start = chunk.start + part * own
        return Chunk(chunk.index, start, start + own)
    width = len(chunk) // (2 * size)
    # The rank's first slice begins at `first`; its second lies `skipped` tokens after the end of that.
    first, skipped = chunk.start + rank * width, (2 * size - 2 - 2 * rank) * width
    start, stop = part * own, (part + 1) * own  # among the rank's tokens
    at = [first + place + (skipped if place >= width else 0) for place in (start, stop - 1)]
    gap = (first + width, first + width + skipped) if start < width < stop and skipped else None
    return Chunk(chunk.index, at[0], at[1] + 1, gap)


def spans(start: int, stop: int, limit: int) -> list[tuple[int, int]]:
    """Cut tokens `start … stop - 1` of keys/values into spans, one for each kernel call.

    Args:
        start: first token.
        stop: token after the last; equal to `start` it gives no span.
        limit: most tokens of a span.

    Returns:
        Pairs (start, stop), of lengths that differ by at most 1: a short last span would waste a kernel call.
    """
    length = stop - start
    count = -(-length // limit)
    return [(start + length * i // count, start + length * (i + 1) // count) for i in range(count)]
