"""Boundaries: how a sequence is cut into chunks.

A chunk is `chunk_size` consecutive tokens of the *global* sequence and the unit that flows through the machine. Nothing
has to divide anything: the last chunk is as long as what is left.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens `start … stop - 1` of the sequence, the `index`-th chunk of it."""

    index: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


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


def spans(stop: int, limit: int) -> list[tuple[int, int]]:
    """Cut tokens `0 … stop - 1` of keys/values into the spans that one kernel call each takes.

    Args:
        stop: tokens to cover; 0 gives no span.
        limit: most tokens in a span.

    Returns:
        (start, stop) pairs, as equal as whole tokens allow, so that no call is left with a sliver.
    """
    count = -(-stop // limit)
    return [(stop * i // count, stop * (i + 1) // count) for i in range(count)]
