"""An allocator of byte ranges within one block of memory or one file: exact sizes, no rounding to powers of two."""

from __future__ import annotations

import bisect

ALIGNMENT = 512  # of a range's start: whole sectors of a disk, whole cache lines, any dtype


class RangeAllocator:
    """Free and taken ranges of `0 … size - 1`; the smallest free range that fits is taken (best fit).

    Args:
        size: bytes.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._starts = [0]  # of the free ranges, rising
        self._stops = [size]
        self._taken: dict[int, int] = {}  # start to length

    @staticmethod
    def rounded(nbytes: int) -> int:
        """Bytes that a range of `nbytes` takes."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def allocate(self, nbytes: int) -> int:
        """Take a range.

        Args:
            nbytes: its length, at least 1.

        Returns:
            Its start.

        Raises:
            MemoryError: no free range is long enough.
        """
        length = self.rounded(nbytes)
        fitting = [
            (stop - start, i)
            for i, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True))
            if stop - start >= length
        ]
        if not fitting:
            raise MemoryError(f"no free range of {length} bytes among {self.size}")
        _, i = min(fitting)
        start = self._starts[i]
        if start + length == self._stops[i]:
            del self._starts[i], self._stops[i]
        else:
            self._starts[i] = start + length
        self._taken[start] = length
        return start

    def free(self, start: int) -> None:
        """Give a range back; it joins free neighbours."""
        stop = start + self._taken.pop(start)
        i = bisect.bisect(self._starts, start)
        if i < len(self._starts) and self._starts[i] == stop:
            stop = self._stops[i]
            del self._starts[i], self._stops[i]
        if i > 0 and self._stops[i - 1] == start:
            self._stops[i - 1] = stop
        else:
            self._starts.insert(i, start)
            self._stops.insert(i, stop)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range."""
        return max((stop - start for start, stop in zip(self._starts, self._stops, strict=True)), default=0)

    @property
    def taken(self) -> int:
        """Bytes in taken ranges."""
        return sum(self._taken.values())
