"""Thinning: no spike is lost, busy time is kept, and there is never more than room is for."""

import random
from itertools import pairwise

import pytest

from trunkline.report.scale import byte_ticks, round_up, ticks
from trunkline.report.thin import busy_shares, columns, thin_lanes


def test_a_spike_shows_however_short_it_is():
    steps = [(0.0, 10), (5.01, 99), (5.01, 10), (7.0, 30), (7.002, 5), (7.004, 10)]
    low, high = columns(steps, 10.0, 100)
    assert max(high) == 99
    assert high.index(99) == 50
    assert (low[70], high[70]) == (5, 30)
    assert set(low[:70]) == {10}


def test_columns_hold_what_was_held_before_them():
    assert columns([(2.5, 7)], 10.0, 4) == ([0, 7, 7, 7], [0, 7, 7, 7])
    assert columns([(0.0, 4), (10.0, 9)], 10.0, 2) == ([4, 4], [4, 9])


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


def test_few_segments_are_left_alone():
    lanes = {"fetch": [(2.0, 3.0, "b"), (0.0, 1.0, "a")]}
    assert thin_lanes(lanes, 3.0, most=2) == ({"fetch": [(0.0, 1.0, "a"), (2.0, 3.0, "b")]}, 0.0)


def test_many_segments_are_merged_with_their_neighbours():
    lanes = {
        "compute": [(i / 100, (i + 0.5) / 100, f"chunk {i}") for i in range(10_000)],
        "fetch": [(i / 10, (i + 0.5) / 10, "input") for i in range(1000)],
    }
    thinned, width = thin_lanes(lanes, 100.0, most=2000)
    total = sum(map(len, thinned.values()))
    # The next finer width is half of this one, so at least about half of the room is used.
    assert 900 <= total <= 2000
    assert width > 0
    for lane, segments in thinned.items():
        assert segments[0][0] == lanes[lane][0][0]
        assert segments[-1][1] == lanes[lane][-1][1]
        assert all(a[1] <= b[0] for a, b in pairwise(segments))
    assert thinned["compute"][0][2].startswith("chunk 0 … chunk ")


def test_what_begins_at_one_moment_is_one():
    thinned, _ = thin_lanes({"compute": [(1.0, 1.0, "tick")] * 100}, 2.0, most=10)
    assert thinned == {"compute": [(1.0, 1.0, "100 x tick")]}


def test_ticks_are_round():
    assert ticks(0.0, 9.0, 4) == [(0.0, "0"), (5.0, "5")]
    assert ticks(1.9, 3.3, 5) == [(2.0, "2.0"), (2.5, "2.5"), (3.0, "3.0")]
    assert byte_ticks(3 * 1024**3, 3)[-1] == (3 * 1024**3, "3 GiB")
    assert round_up(80.0, 5) == 100.0
