"""Perplexity by position and document, compared with sums written out."""

from __future__ import annotations

import math

import pytest
import torch

from trunkline.evaluate import PerplexityMeter


def _scores(losses):
    return -torch.tensor(losses, dtype=torch.float32)


def test_bins_double_and_the_first_token_does_not_count():
    meter = PerplexityMeter()
    meter.add("a", _scores([99.0, 1, 2, 4, 8, 16, 32, 64, 128]))
    meter.add("b", _scores([99.0, 3]))
    found = [(loss.first, loss.last, loss.num_tokens, loss.loss) for loss in meter.by_position()]
    assert found == [(1, 1, 2, 2.0), (2, 3, 2, 3.0), (4, 7, 4, 30.0), (8, 15, 1, 128.0)]
    assert [(loss.name, loss.num_tokens, loss.loss) for loss in meter.by_document()] == [
        ("a", 8, 31.875),
        ("b", 1, 3.0),
    ]
    assert meter.by_position()[0].perplexity == pytest.approx(math.exp(2))


def test_bins_have_a_fixed_width():
    meter = PerplexityMeter(3)
    meter.add("a", _scores([99.0, 1, 3, 4, 8, 0, 6]))
    found = [(loss.first, loss.last, loss.num_tokens, loss.loss) for loss in meter.by_position()]
    assert found == [(1, 2, 2, 2.0), (3, 5, 3, 4.0), (6, 8, 1, 6.0)]


def test_bins_begin_exactly_at_powers_of_two():
    meter = PerplexityMeter()
    meter.add("a", _scores([0.0] * (2**15 + 1)))
    assert [loss.num_tokens for loss in meter.by_position()] == [2**k for k in range(15)] + [1]


def test_one_token_has_no_loss_and_a_huge_loss_is_infinite_perplexity():
    meter = PerplexityMeter()
    meter.add("a", _scores([0.0]))
    meter.add("b", _scores([0.0, 1000.0]))
    one, huge = meter.by_document()
    assert (one.num_tokens, math.isnan(one.loss)) == (0, True)
    assert huge.perplexity == math.inf
