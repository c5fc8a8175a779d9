"""Columns of time: no spike is lost, and busy time is kept."""

import random

import pytest

from trunkline.report.columns import busy_shares, memory_columns


def test_a_spike_shows_however_short_it_is():
    steps = [(0.0, 10), (5.01, 99), (5.01, 10), (7.0, 30), (7.002, 5), (7.004, 10)]
    low, high = memory_columns(steps, 10.0, 100)
    assert max(high) == 99
    assert high.index(99) == 50
    assert (low[70], high[70]) == (5, 30)
    assert set(low[:70]) == {10}


def test_columns_hold_what_was_held_before_them():
    assert memory_columns([(2.5, 7)], 10.0, 4) == ([0, 7, 7, 7], [0, 7, 7, 7])
    assert memory_columns([(0.0, 4), (10.0, 9)], 10.0, 2) == ([4, 4], [4, 9])


def test_shares_add_up_to_busy_time():
    generator = random.Random(0)
    segments, at = [], 0.0
    while at < 9.0:
        length = generator.random() * 0.03
        segments.append((at, at + length, ""))
        at += length + generator.random() * 0.1
    shares = busy_shares(segments, 10.0, 37)
    # Sums of some 140 floats of about 1: far below 1e-9.
    assert sum(shares) * 10 / 37 == pytest.approx(sum(end - begin for begin, end, _ in segments), abs=1e-9)
    assert busy_shares([(0.0, 5.0, "a"), (2.0, 7.5, "b")], 10.0, 4) == [1, 1, 1, 0]
