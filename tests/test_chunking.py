import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.chunking import spans, split


@given(seq_len=st.integers(1, 300), chunk_size=st.integers(1, 400))
def test_chunks_cover_the_sequence_in_order(seq_len: int, chunk_size: int) -> None:
    chunks = split(seq_len, chunk_size)
    assert [token for c in chunks for token in range(c.start, c.stop)] == list(range(seq_len))
    assert [c.index for c in chunks] == list(range(len(chunks)))
    assert all(len(c) == chunk_size for c in chunks[:-1])
    assert len(chunks) == -(-seq_len // chunk_size)


@given(stop=st.integers(0, 500), limit=st.integers(1, 100))
def test_spans_cover_and_are_even(stop: int, limit: int) -> None:
    pieces = spans(stop, limit)
    assert [token for a, b in pieces for token in range(a, b)] == list(range(stop))
    sizes = [b - a for a, b in pieces]
    assert all(0 < size <= limit for size in sizes)
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(pieces) == -(-stop // limit)


def test_nothing_to_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="chunk_size=0"):
        split(10, 0)
    with pytest.raises(ValueError, match="no tokens"):
        split(0, 4)
