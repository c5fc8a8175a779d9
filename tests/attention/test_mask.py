"""What tokens see, in blocks, against the definition."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkline.attention.mask import AttentionSpan, MaskBlock, RowMask
from trunkline.attention.schedule import ChunkSchedule
from trunkline.chunking import Chunk, split, zigzag

SEQ = 40


@st.composite
def sights(draw: st.DrawFn) -> RowMask:
    starts = draw(st.sets(st.integers(1, SEQ - 1), max_size=6))
    return RowMask((0, *sorted(starts)), draw(st.none() | st.integers(1, 12)))


def sees(sight: RowMask, q: int, k: int) -> bool:
    start = max(at for at in sight.starts if at <= q)
    return start <= k <= q and (sight.window is None or q - k < sight.window)


def pairs(block: MaskBlock, tokens: list[int]) -> list[tuple[int, int]]:
    """Which rows meet which keys in a block, by what its shape is said to mean."""
    rows, keys = tokens[slice(*block.rows)], list(range(*block.keys))
    size = block.fold or len(rows)
    assert len(rows) % size == 0
    count = len(rows) // size if rows else 0
    found = []
    for piece in range(count):
        own = rows[piece * size : (piece + 1) * size]
        width = block.fold or len(keys)
        met = keys[piece * width : (piece + 1) * width]
        for i, q in enumerate(own):
            for j, k in enumerate(met):
                lower = j <= i + len(met) - len(own)
                if block.shape == "full" or (block.shape == "lower" and lower) or (block.shape == "upper" and j >= i):
                    found.append((q, k))
    return found


@settings(max_examples=300)
@given(sight=sights(), chunk_size=st.integers(1, 45), joined=st.booleans(), one=st.booleans())
def test_blocks_are_what_tokens_see(sight: RowMask, chunk_size: int, joined: bool, one: bool) -> None:
    """Every pair once, and no other, of keys in one piece or chunk by chunk; and no chunk is met for nothing."""
    chunks = split(SEQ, chunk_size)
    meetings = ChunkSchedule(chunks, [sight], 0, 1)
    for chunk in chunks:
        ranges = [(meetings.first_keys[chunk.index], chunk.stop)]
        if not one:
            ranges = [(chunks[i].start, chunks[i].stop) for i in (*meetings.before(chunk), chunk.index)]
        tokens, met = list(range(chunk.start, chunk.stop)), []
        for start, stop in ranges:
            blocks = [block for _, block in meetings.blocks(chunk, start, stop - start, joined=joined)]
            assert one or blocks, "a chunk is met for nothing"
            for block in blocks:
                assert start <= block.keys[0] < block.keys[1] <= stop
                n, m = block.rows[1] - block.rows[0], block.keys[1] - block.keys[0]
                assert block.shape == "full" or n == m or (joined and n < m and not block.fold)
                met += pairs(block, tokens)
        assert sorted(met) == [(q, k) for q in tokens for k in range(SEQ) if sees(sight, q, k)]
    every = sum(sees(sight, q, k) for q in range(SEQ) for k in range(SEQ))
    assert sight.num_pairs(SEQ) == every


@settings(max_examples=200)
@given(sight=sights(), units=st.integers(1, 4), size=st.integers(2, 4), joined=st.booleans())
def test_blocks_of_a_rank(sight: RowMask, units: int, size: int, joined: bool) -> None:
    """The same of the two slices that each of several ranks has of a chunk."""
    length = 2 * size * units
    whole = split(length * (SEQ // length), length) if length <= SEQ else []
    for rank in range(size):
        rows = [Chunk(c.index, c.start // size, c.stop // size) for c in whole]
        meetings = ChunkSchedule(rows, [sight], rank, size)
        for chunk in whole:
            tokens = [t for a, b in zigzag(chunk, rank, size).ranges for t in range(a, b)]
            met = []
            for i in (*meetings.before(rows[chunk.index]), chunk.index):
                start = meetings.starts[i]
                for _, block in meetings.blocks(rows[chunk.index], start, length, joined=joined):
                    met += pairs(block, tokens)
            assert sorted(met) == [(q, k) for q in tokens for k in range(SEQ) if sees(sight, q, k)]


@given(sight=sights(), chunk_size=st.integers(1, 45))
def test_what_is_met_later_and_passed(sight: RowMask, chunk_size: int) -> None:
    chunks = split(SEQ, chunk_size)
    meetings = ChunkSchedule(chunks, [sight], 0, 1)
    met = {c.index: {*meetings.before(c), c.index} for c in chunks}
    for chunk in chunks:
        later = set().union(*(met[i] for i in range(chunk.index + 1, len(chunks))))
        assert all(meetings.is_met_after(chunk, j) == (j in later) for j in range(chunk.index + 1))
        assert set(meetings.passed(chunk)) == met[chunk.index] - later


def test_calls_do_not_grow_with_a_short_window() -> None:
    """A window much shorter than a chunk takes as many calls as one of half a chunk."""
    chunks = split(4096, 1024)
    counts = {}
    for window in (8, 65, 129, 513):
        meetings = ChunkSchedule(chunks, [RowMask((0,), window)], 0, 1)
        counts[window] = len(list(meetings.blocks(chunks[2], 2048 - window + 1, 1024 + window - 1, joined=False)))
    assert max(counts.values()) <= 8


@given(
    window=st.none() | st.integers(1, 9), chunk=st.none() | st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)  # fmt: skip
def test_reach_over_documents(window: int | None, chunk: int | None, lengths: list[int]) -> None:
    """What a layer sees within a document, in all documents of a row."""
    if window is not None and chunk is not None:
        window = None
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    starts = [0, *ends[:-1]]
    reach = AttentionSpan(window, chunk)
    (sight,) = reach.row_masks([starts], ends[-1])
    for start, stop in pairwise([0, *ends]):
        at = torch.arange(stop - start)
        expected = reach.visible(at[:, None], at[None])
        found = [[sees(sight, start + q, start + k) for k in range(stop - start)] for q in range(stop - start)]
        assert expected.tolist() == found
        assert not any(sees(sight, start, k) for k in range(start))


@pytest.mark.parametrize("reach", [AttentionSpan(), AttentionSpan(window=64), AttentionSpan(chunk=64)])
def test_what_reaches_further_than_the_sequence_is_causal(reach: AttentionSpan) -> None:
    assert all(each.is_causal for each in reach.row_masks([(0,), (0,)], 64))
    assert all(each.is_causal == (reach == AttentionSpan()) for each in reach.row_masks([(0,)], 65))
