"""Cutting: whole pieces of one document each, the rest counted as dropped; and the order of samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkline.data import Document, SampleOrder, cut_documents, load_encoder

ENCODER = load_encoder("bytes")


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(2, 20))
def test_no_sample_crosses_a_document(lengths, context):
    # Every document is of one letter, so that a sample of two documents would have two.
    documents = [Document(f"d{i}", chr(97 + i) * length) for i, length in enumerate(lengths)]
    if max(lengths) + 1 < context:
        with pytest.raises(ValueError, match="longer than every document"):
            cut_documents(documents, ENCODER, context=context)
        return
    samples = cut_documents(documents, ENCODER, context=context)
    assert all(len(piece) == context for piece in samples.pieces)
    assert all(len(set(piece.tolist()) - {256}) <= 1 for piece in samples.pieces)
    report = samples.report
    assert report.num_samples == len(samples) == sum((length + 1) // context for length in lengths)
    assert report.num_short_documents == sum(length + 1 < context for length in lengths)
    assert report.num_used_tokens + report.num_dropped_tokens == report.num_tokens == sum(lengths) + len(lengths)


def test_pieces_are_consecutive_and_the_report_says_what_was_dropped():
    text = "".join(chr(32 + i) for i in range(90))
    samples = cut_documents([Document("long", text), Document("short", "abc")], ENCODER, context=40)
    assert np.concatenate(samples.pieces).tolist() == list(text.encode()[:80])
    assert samples.report.num_tokens == 95
    assert str(samples.report) == (
        "2 samples of 40 tokens from 1 of 2 documents: 80 of 95 tokens used (84.2%). Dropped 15 tokens (15.8%): "
        "1 documents shorter than the context, and the ends of longer ones."
    )


def test_an_empty_corpus_and_a_too_long_context_name_the_fix():
    with pytest.raises(ValueError, match=r"data\.files: the corpus is empty"):
        cut_documents([], ENCODER, context=4)
    with pytest.raises(ValueError, match=r"context: 9 tokens is longer .*'b', has 6 tokens.*Set context to 6 or less"):
        cut_documents([Document("a", "xy"), Document("b", "12345")], ENCODER, context=9)


def test_order_depends_on_the_seed_alone():
    order = SampleOrder(7, seed=3)
    stream = order.take(0, 21)
    assert [sorted(stream[i : i + 7]) for i in (0, 7, 14)] == [list(range(7))] * 3
    assert stream[:7] != stream[7:14]
    # Read in any portions it is the same.
    assert [i for start in range(0, 21, 3) for i in order.take(start, 3)] == stream
    assert SampleOrder(7, seed=3).take(0, 21) == stream
    assert SampleOrder(7, seed=4).take(0, 21) != stream
