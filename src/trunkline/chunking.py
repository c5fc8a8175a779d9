"""Boundaries: how a sequence is cut into chunks.

A chunk is `chunk_size` consecutive tokens of the *global* sequence and the unit that flows through the machine. Nothing
has to divide anything: the last chunk is as long as what is left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … stop - 1` of the sequence, the `index`-th chunk of it, or a rank's part of that chunk.

    Attributes:
        index: which.
        start: the first token.
        stop: the one after the last.
        gap: the first and the one after the last of tokens between that are not in it: other ranks'.
    """

    index: int
    start: int
    stop: int
    gap: tuple[int, int] | None = None

    def __len__(self) -> int:
        return self.stop - self.start if self.gap is None else self.stop - self.gap[1] + self.gap[0] - self.start

    @property
    def ranges(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of consecutive tokens: one, or two around the gap."""
        return ((self.start, self.stop),) if self.gap is None else ((self.start, self.gap[0]), (self.gap[1], self.stop))


def split(seq_len: int, chunk_size: int) -> list[Chunk]:
    """Cut a sequence into chunks.

    Args:
        seq_len: tokens in the sequence, at least 1.
        chunk_size: tokens in a chunk, at least 1; larger than `seq_len` gives one chunk.

    Returns:
        The chunks in order; all but the last have `chunk_size` tokens.

    Raises:
        ValueError: either number is below 1.
    """
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: give a positive number of tokens, or 'auto'.")
    if seq_len < 1:
        raise ValueError("input_ids has no tokens: give at least one token a row.")
    starts = range(0, seq_len, chunk_size)
    return [Chunk(i, start, min(start + chunk_size, seq_len)) for i, start in enumerate(starts)]


def zigzag(chunk: Chunk, rank: int, size: int, part: int = 0, parts: int = 1) -> Chunk:
    """A rank's tokens of a chunk, such that causal attention is as much work for every rank.

    The chunk is cut into twice as many slices as there are ranks; the first goes with the last, the second with the
    last but one, and so on.

    Args:
        chunk: of a length that 2 x `size` divides, and `size` x `parts`; with one rank `parts` alone.
        rank: which, of `size`.
        size: ranks.
        part: the rank's tokens are cut evenly again, in their order: which of these parts, of `parts`.
        parts: how many.
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
    """Cut tokens `start … stop - 1` of keys/values into the spans that one kernel call each takes.

    Args:
        start: the first token to cover.
        stop: the one after the last; `start` gives no span.
        limit: most tokens in a span.

    Returns:
        (start, stop) pairs, as equal as whole tokens allow, so that no call is left with a sliver.
    """
    length = stop - start
    count = -(-length // limit)
    return [(start + length * i // count, start + length * (i + 1) // count) for i in range(count)]
