"""Makes a step of a million events as small as a screen can show, without hiding a spike.

Everything here goes by columns of time: what falls into one column is drawn as one thing, the highest of it for memory,
the share of busy time for lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trunkline.report.timeline import Segment

MOST_SEGMENTS = 20_000
FINEST = 1e-7  # of the step


def columns(steps: Sequence[tuple[float, int]], end: float, count: int) -> tuple[list[int], list[int]]:
    """Return the lowest and the highest value of a step function in each of `count` columns of time.

    Args:
        steps: (second, value) in order of seconds; before the first the value is 0.
        end: second at which the last column ends.
        count: columns.

    Returns:
        Lowest and highest, each (count,).
    """
    low, high = [], []
    held, index = 0, 0
    for column in range(count):
        begin, until = end * column / count, end * (column + 1) / count
        met: list[int] = []
        while index < len(steps) and steps[index][0] <= begin:
            held = steps[index][1]
            # Several changes at one moment: each was held, if for no time.
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
    """Return the share of each of `count` columns of time in which a lane works, each 0 to 1."""
    shares = [0.0] * count
    width = end / count
    reached = 0.0
    for begin, until, _ in sorted(segments):
        begin, reached = max(begin, reached), max(until, reached)
        if until <= begin:
            continue
        first, last = min(count - 1, int(begin / width)), min(count - 1, int(until / width))
        for column in range(first, last + 1):
            overlap = min(until, (column + 1) * width) - max(begin, column * width)
            shares[column] += max(0.0, overlap) / width
    return [min(1.0, share) for share in shares]


def thin_lanes(
    lanes: Mapping[str, Sequence[Segment]], end: float, most: int = MOST_SEGMENTS
) -> tuple[dict[str, list[Segment]], float]:
    """Merge neighbours in time until at most `most` segments are left over all lanes.

    Args:
        lanes: by lane, (begin, end, label).
        end: second at which the step ends.
        most: segments over all lanes.

    Returns:
        The lanes, each in order of time, and the column's width in seconds: what begins in one column is one
        segment now. 0 where nothing was merged.
    """
    total = sum(len(segments) for segments in lanes.values())
    if total <= most:
        return {lane: sorted(segments) for lane, segments in lanes.items()}, 0.0
    # With this width no lane can have more than its part; halved as often as room allows, it shows as much as it may.
    width = end / (most // max(1, sum(1 for segments in lanes.values() if segments)))
    # What begins at one moment stays one at any width, so there is an end to it.
    while width > FINEST * end and _num_merged(lanes, width / 2) <= most:
        width /= 2
    return {lane: _merged(sorted(segments), width) for lane, segments in lanes.items()}, width


def _column(begin: float, width: float) -> int:
    # The step's very end belongs to its last column.
    return int(begin / width * (1 - 1e-12))


def _num_merged(lanes: Mapping[str, Sequence[Segment]], width: float) -> int:
    return sum(len({_column(begin, width) for begin, _, _ in segments}) for segments in lanes.values())


def _merged(segments: Sequence[Segment], width: float) -> list[Segment]:
    groups: list[list[Segment]] = []
    column = -1
    for segment in segments:
        here = _column(segment[0], width)
        if here == column:
            groups[-1].append(segment)
        else:
            groups.append([segment])
            column = here
    return [(group[0][0], max(end for _, end, _ in group), _label(group)) for group in groups]


def _label(group: Sequence[Segment]) -> str:
    first, last = group[0][2], group[-1][2]
    if len(group) == 1:
        return first
    return f"{len(group)} x {first}" if len({label for _, _, label in group}) == 1 else f"{first} … {last}"
