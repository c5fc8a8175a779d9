"""Draws: the published generator's values, every value as likely, streams that do not depend on each other."""

from trunkline.evaluate.draws import Draws


def test_the_generator_is_splitmix64():
    draws = Draws()
    draws._state = 1234567
    # The first values of the generator at this state, as its authors' C code gives them.
    assert [draws._next() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_all_values_are_as_likely():
    draws, counts = Draws("dice"), [0] * 6
    for _ in range(60_000):
        counts[draws.below(6)] += 1
    # Standard deviation of a count: sqrt(60000 * 1/6 * 5/6) = 91; five of these.
    assert all(abs(count - 10_000) < 456 for count in counts)


def test_shuffles_are_drawn_from_all_orders():
    draws, seen = Draws("cards"), {}
    for _ in range(6000):
        items = [0, 1, 2]
        draws.shuffle(items)
        seen[tuple(items)] = seen.get(tuple(items), 0) + 1
    # Standard deviation: sqrt(6000 * 1/6 * 5/6) = 29; five of these.
    assert len(seen) == 6
    assert all(abs(count - 1000) < 145 for count in seen.values())


def test_keys_make_streams_of_their_own():
    streams = [Draws(*key) for key in ((0, "a"), (0, "b"), (1, "a"), ("0", "a"))]
    values = [[stream.below(2**32) for _ in range(8)] for stream in streams]
    assert len({tuple(v) for v in values}) == 4
    assert [Draws(0, "a").below(2**32) for _ in range(2)] == [values[0][0]] * 2
