"""The generator: published values, uniform draws, independent streams."""

import pytest

from trunkline.evaluate.seeded import SplitMix64, UniqueWords


def test_values_are_those_of_splitmix64():
    draws = SplitMix64()
    draws._state = 1234567
    # The first values of the generator at this state, as its authors' C code gives them.
    assert [draws._next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_draws_are_uniform():
    draws, counts = SplitMix64("dice"), [0] * 6
    for _ in range(60_000):
        counts[draws.below(6)] += 1
    # Standard deviation of a count: sqrt(60000 * 1/6 * 5/6) = 91; five of these.
    assert all(abs(count - 10_000) < 456 for count in counts)


def test_every_order_of_a_shuffle_is_equally_likely():
    draws, seen = SplitMix64("cards"), {}
    for _ in range(6000):
        items = [0, 1, 2]
        draws.shuffle(items)
        seen[tuple(items)] = seen.get(tuple(items), 0) + 1
    # Standard deviation: sqrt(6000 * 1/6 * 5/6) = 29; five of these.
    assert len(seen) == 6
    assert all(abs(count - 1000) < 145 for count in seen.values())


def test_streams_of_different_keys_are_independent():
    streams = [SplitMix64(*key) for key in ((0, "a"), (0, "b"), (1, "a"), ("0", "a"))]
    values = [[stream.below(2**32) for _ in range(8)] for stream in streams]
    assert len({tuple(v) for v in values}) == 4
    assert [SplitMix64(0, "a").below(2**32) for _ in range(2)] == [values[0][0]] * 2


def test_numbers_that_are_used_up_are_an_error() -> None:
    words = UniqueWords(SplitMix64(0))
    assert len({words.number(1) for _ in range(9)}) == 9
    with pytest.raises(ValueError, match="use more digits or fewer depths"):
        words.number(1)
