"""Perplexity by position and document, against sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from trunkline.evaluate import PerplexityMeter, TokenScores


def _scores(rows):
    log_probs = -torch.tensor(rows, dtype=torch.float32)
    return TokenScores(log_probs, torch.zeros(log_probs.shape, dtype=torch.bool))


def test_bins_double_and_the_first_token_counts_nowhere():
    meter = PerplexityMeter()
    meter.add(_scores([[99.0, 1, 2, 4, 8, 16, 32, 64, 128]]), [["a"]])
    meter.add(_scores([[99.0, 3]]), [["b"]])
    found = [(loss.first, loss.last, loss.num_tokens, loss.loss) for loss in meter.by_position()]
    assert found == [(1, 1, 2, 2.0), (2, 3, 2, 3.0), (4, 7, 4, 30.0), (8, 15, 1, 128.0)]
    assert [(loss.name, loss.num_tokens, loss.loss) for loss in meter.by_document()] == [
        ("a", 8, 31.875),
        ("b", 1, 3.0),
    ]
    assert meter.by_position()[0].perplexity == pytest.approx(math.exp(2))


def test_bins_of_a_fixed_width():
    meter = PerplexityMeter(3)
    meter.add(_scores([[99.0, 1, 3, 4, 8, 0, 6]]), [["a"]])
    found = [(loss.first, loss.last, loss.num_tokens, loss.loss) for loss in meter.by_position()]
    assert found == [(1, 2, 2, 2.0), (3, 5, 3, 4.0), (6, 8, 1, 6.0)]


def test_packed_documents_are_those_documents():
    """Two rows that hold three documents give what the documents give alone; nothing predicts a first token."""
    rows = torch.rand(2, 12)
    rows[0, 0] = rows[0, 7] = rows[1, 0] = 0
    document_ids = torch.tensor([[4] * 7 + [2] * 5, [0] * 12])
    packed, alone = PerplexityMeter(), PerplexityMeter()
    packed.add(_scores(rows.tolist()), [["a", "b"], ["c"]], document_ids)
    for name, piece in (("a", rows[0, :7]), ("b", rows[0, 7:]), ("c", rows[1])):
        alone.add(_scores([piece.tolist()]), [[name]])
    assert packed.by_document() == alone.by_document()
    for one, other in zip(packed.by_position(), alone.by_position(), strict=True):
        assert (one.first, one.last, one.num_tokens) == (other.first, other.last, other.num_tokens)
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
    assert sum(loss.num_tokens for loss in packed.by_position()) == 6 + 4 + 11


def test_names_must_be_as_many_as_documents():
    with pytest.raises(ValueError, match="names: 1 for a row that document_ids cut into 2"):
        PerplexityMeter().add(_scores([[0.0, 1, 0, 1]]), [["a"]], torch.tensor([[0, 0, 1, 1]]))


def test_powers_of_two_begin_bins_exactly():
    meter = PerplexityMeter()
    meter.add(_scores([[0.0] * (2**15 + 1)]), [["a"]])
    assert [loss.num_tokens for loss in meter.by_position()] == [2**k for k in range(15)] + [1]


def test_a_document_of_one_token_has_no_loss_and_a_huge_loss_no_end():
    meter = PerplexityMeter()
    meter.add(_scores([[0.0]]), [["a"]])
    meter.add(_scores([[0.0, 1000.0]]), [["b"]])
    one, huge = meter.by_document()
    assert (one.num_tokens, math.isnan(one.loss)) == (0, True)
    assert huge.perplexity == math.inf
