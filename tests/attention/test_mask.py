"""Row masks, blocks and schedules against the definition of visibility."""

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
def row_masks(draw: st.DrawFn) -> RowMask:
    starts = draw(st.sets(st.integers(1, SEQ - 1), max_size=6))
    return RowMask((0, *sorted(starts)), draw(st.none() | st.integers(1, 12)))


def sees(mask: RowMask, q: int, k: int) -> bool:
    start = max(at for at in mask.starts if at <= q)
    return start <= k <= q and (mask.window is None or q - k < mask.window)


def pairs(block: MaskBlock, tokens: list[int]) -> list[tuple[int, int]]:
    """Return the (query, key) pairs of a block, by the documented meaning of its shape."""
    rows, keys = tokens[slice(*block.rows)], list(range(*block.keys))
    size = block.tile or len(rows)
    assert len(rows) % size == 0
    count = len(rows) // size if rows else 0
    found = []
    for tile in range(count):
        own = rows[tile * size : (tile + 1) * size]
        width = block.tile or len(keys)
        span = keys[tile * width : (tile + 1) * width]
        for i, q in enumerate(own):
            for j, k in enumerate(span):
                lower = j <= i + len(span) - len(own)
                if block.shape == "full" or (block.shape == "lower" and lower) or (block.shape == "upper" and j >= i):
                    found.append((q, k))
    return found


@settings(max_examples=200)
@given(mask=row_masks(), chunk_size=st.integers(1, 45), bottom_right=st.booleans(), in_one_span=st.booleans())
def test_blocks_hold_each_visible_pair_once(
    mask: RowMask, chunk_size: int, bottom_right: bool, in_one_span: bool
) -> None:
    """For keys in one span or chunk by chunk; and every scheduled chunk has a visible pair."""
    chunks = split(SEQ, chunk_size)
    schedule = ChunkSchedule(chunks, [mask], 0, 1)
    for chunk in chunks:
        ranges = [(schedule.first_keys[chunk.index], chunk.stop)]
        if not in_one_span:
            ranges = [(chunks[i].start, chunks[i].stop) for i in (*schedule.earlier(chunk), chunk.index)]
        tokens, seen = list(range(chunk.start, chunk.stop)), []
        for start, stop in ranges:
            blocks = mask.blocks(schedule.queries(chunk), (start, stop), bottom_right=bottom_right)
            assert in_one_span or blocks, "a scheduled chunk has no visible pair"
            for block in blocks:
                assert start <= block.keys[0] < block.keys[1] <= stop
                n, m = block.rows[1] - block.rows[0], block.keys[1] - block.keys[0]
                assert block.shape == "full" or n == m or (bottom_right and n < m and not block.tile)
                seen += pairs(block, tokens)
        assert sorted(seen) == [(q, k) for q in tokens for k in range(SEQ) if sees(mask, q, k)]
    every = sum(sees(mask, q, k) for q in range(SEQ) for k in range(SEQ))
    assert mask.num_pairs(SEQ) == every


@settings(max_examples=200)
@given(mask=row_masks(), units=st.integers(1, 4), size=st.integers(2, 4), bottom_right=st.booleans())
def test_blocks_hold_each_visible_pair_once_over_ranks(
    mask: RowMask, units: int, size: int, bottom_right: bool
) -> None:
    """Each rank has two zigzag slices of a chunk."""
    length = 2 * size * units
    whole = split(length * (SEQ // length), length) if length <= SEQ else []
    for rank in range(size):
        rows = [Chunk(c.index, c.start // size, c.stop // size) for c in whole]
        schedule = ChunkSchedule(rows, [mask], rank, size)
        for chunk in whole:
            tokens = [t for a, b in zigzag(chunk, rank, size).ranges for t in range(a, b)]
            seen = []
            for i in (*schedule.earlier(rows[chunk.index]), chunk.index):
                start = schedule.starts[i]
                for block in mask.blocks(
                    schedule.queries(rows[chunk.index]), (start, start + length), bottom_right=bottom_right
                ):
                    seen += pairs(block, tokens)
            assert sorted(seen) == [(q, k) for q in tokens for k in range(SEQ) if sees(mask, q, k)]


@given(mask=row_masks(), chunk_size=st.integers(1, 45))
def test_schedule_finds_the_last_use_of_a_chunk(mask: RowMask, chunk_size: int) -> None:
    chunks = split(SEQ, chunk_size)
    schedule = ChunkSchedule(chunks, [mask], 0, 1)
    used = {c.index: {*schedule.earlier(c), c.index} for c in chunks}
    for chunk in chunks:
        later = set().union(*(used[i] for i in range(chunk.index + 1, len(chunks))))
        assert all(schedule.is_used_after(chunk, j) == (j in later) for j in range(chunk.index + 1))
        assert set(schedule.last_used_by(chunk)) == used[chunk.index] - later


def test_a_short_window_takes_few_calls() -> None:
    """A window much shorter than a chunk takes no more calls than one of half a chunk."""
    counts = {}
    for window in (8, 65, 129, 513):
        keys = 2048 - window + 1, 3072
        counts[window] = len(RowMask((0,), window).blocks([(2048, 3072)], keys))
    assert max(counts.values()) <= 8


@given(
    window=st.none() | st.integers(1, 9), chunk=st.none() | st.integers(1, 9),
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
)  # fmt: skip
def test_row_masks_of_documents(window: int | None, chunk: int | None, lengths: list[int]) -> None:
    """A row mask shows each document what the attention span shows it, and nothing across documents."""
    if window is not None and chunk is not None:
        window = None
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    starts = [0, *ends[:-1]]
    reach = AttentionSpan(window, chunk)
    (mask,) = reach.row_masks([starts], ends[-1])
    for start, stop in pairwise([0, *ends]):
        at = torch.arange(stop - start)
        expected = reach.visible(at[:, None], at[None])
        found = [[sees(mask, start + q, start + k) for k in range(stop - start)] for q in range(stop - start)]
        assert expected.tolist() == found
        assert not any(sees(mask, start, k) for k in range(start))


@pytest.mark.parametrize("reach", [AttentionSpan(), AttentionSpan(window=64), AttentionSpan(chunk=64)])
def test_a_span_longer_than_the_sequence_is_causal(reach: AttentionSpan) -> None:
    assert all(each.is_causal for each in reach.row_masks([(0,), (0,)], 64))
    assert all(each.is_causal == (reach == AttentionSpan()) for each in reach.row_masks([(0,)], 65))
