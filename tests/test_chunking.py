import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.chunking import Chunk, spans, split, zigzag


@given(seq_len=st.integers(1, 300), chunk_size=st.integers(1, 400))
def test_chunks_cover_the_sequence_in_order(seq_len: int, chunk_size: int) -> None:
    chunks = split(seq_len, chunk_size)
    assert [token for c in chunks for token in range(c.start, c.stop)] == list(range(seq_len))
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert all(len(c) == chunk_size for c in chunks[:-1])
    assert len(chunks) == -(-seq_len // chunk_size)


@given(start=st.integers(0, 50), length=st.integers(0, 500), limit=st.integers(1, 100))
def test_spans_cover_and_are_even(start: int, length: int, limit: int) -> None:
    pieces = spans(start, start + length, limit)
    assert [token for a, b in pieces for token in range(a, b)] == list(range(start, start + length))
    sizes = [b - a for a, b in pieces]
    assert all(0 < size <= limit for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(pieces) == -(-length // limit)


def tokens_of(chunk: Chunk) -> list[int]:
    return [token for start, stop in chunk.ranges for token in range(start, stop)]


@given(size=st.integers(1, 5), parts=st.integers(1, 5), units=st.integers(1, 3), start=st.integers(0, 50))
def test_ranks_share_a_chunk_and_its_causal_work(size: int, parts: int, units: int, start: int) -> None:
    length = units * (parts if size == 1 else size * math.lcm(2, parts))
    chunk = Chunk(3, start, start + length)
    own = {(r, p): zigzag(chunk, r, size, p, parts) for r in range(size) for p in range(parts)}
    assert all(len(tokens_of(each)) == len(each) == length // (size * parts) for each in own.values())
    assert all(tokens_of(each) == sorted(tokens_of(each)) and each.index == 3 for each in own.values())
    by_rank = [[token for p in range(parts) for token in tokens_of(own[r, p])] for r in range(size)]
    assert sorted(token for each in by_rank for token in each) == list(range(start, start + length))
    assert all(each == sorted(each) for each in by_rank)  # so that a rank's parts are its rows in their order
    assert len({sum(each) for each in by_rank}) == 1  # keys that a rank's rows meet


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        split(10, 0)
    with pytest.raises(ValueError, match="no tokens"):
        split(0, 4)
