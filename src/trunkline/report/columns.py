"""Columns of time: a step of a million events becomes as small as a picture can show, and every spike stays.

Memory keeps its lowest and highest value of a column, a lane its share of busy time.
"""

from __future__ import annotations

from collections.abc import Sequence

from trunkline.report.timeline import Segment, disjoint


def memory_columns(steps: Sequence[tuple[float, int]], end: float, count: int) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest value of a step function in each of `count` columns of time.

    Args:
        steps: (second, value) in order of seconds; the value is 0 before the first.
        end: Second at which the last column ends.
        count: Number of columns.

    Returns:
        Lowest and highest values, each of length `count`.
    """
    low, high = [], []
    held, index = 0, 0
    for column in range(count):
        begin, until = end * column / count, end * (column + 1) / count
        met: list[int] = []
        while index < len(steps) and steps[index][0] <= begin:
            held = steps[index][1]
            # Of several changes at one moment each counts, though it was held for no time.
            met.append(held)
            index += 1
        least, most = held, max(met, default=held)
        while index < len(steps) and (steps[index][0] < until or column == count - 1):
            held = steps[index][1]
            least, most = min(least, held), max(most, held)
            index += 1
        low.append(least)
        high.append(most)
    return low, high


def busy_shares(segments: Sequence[Segment], end: float, count: int) -> list[float]:
    """Return the busy share, 0 to 1, of a lane in each of `count` columns of time that end at second `end`."""
    shares = [0.0] * count
    width = end / count
    for begin, until in disjoint(segments):
        first, last = min(count - 1, int(begin / width)), min(count - 1, int(until / width))
        for column in range(first, last + 1):
            overlap = min(until, (column + 1) * width) - max(begin, column * width)
            shares[column] += max(0.0, overlap) / width
    return [min(1.0, share) for share in shares]
