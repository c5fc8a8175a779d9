"""Allocator of byte ranges within one memory block or one file."""

from __future__ import annotations

import bisect

ALIGNMENT = 512  # bytes: a disk sector, a multiple of a cache line and of every dtype


class RangeAllocator:
    """Best-fit allocator over bytes `0 … size - 1`.

    Lengths are rounded up to `ALIGNMENT` bytes, not to a power of two, so that almost no memory is lost.

    Args:
        size: bytes to manage.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # Free ranges in ascending order. Two of them never touch: `free` merges neighbours.
        self._starts = [0]
        self._stops = [size]
        self._lengths: dict[int, int] = {}  # allocated ranges: start to length

    @staticmethod
    def round_up(nbytes: int) -> int:
        """Return the bytes that an allocation of `nbytes` takes."""
        return -(-nbytes // ALIGNMENT) * ALIGNMENT

    def allocate(self, nbytes: int) -> int:
        """Allocate the smallest free range that is long enough.

        Args:
            nbytes: bytes wanted, at least 1.

        Returns:
            Offset of the first byte, a multiple of `ALIGNMENT`.

        Raises:
            MemoryError: no free range is long enough.
        """
        length = self.round_up(nbytes)
        free = enumerate(zip(self._starts, self._stops, strict=True))
        fitting = [(stop - start, i) for i, (start, stop) in free if stop - start >= length]
        if not fitting:
            raise MemoryError(f"no free range of {length} bytes among {self.size}")
        _, i = min(fitting)
        start = self._starts[i]
        if start + length == self._stops[i]:
            del self._starts[i], self._stops[i]
        else:
            self._starts[i] = start + length
        self._lengths[start] = length
        return start

    def free(self, start: int) -> None:
        """Free the range that `allocate` returned as `start`, and merge it with free neighbours."""
        stop = start + self._lengths.pop(start)
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
    def largest_free(self) -> int:
        """Bytes of the largest free range; 0 if there is none."""
        return max((stop - start for start, stop in zip(self._starts, self._stops, strict=True)), default=0)

    @property
    def allocated(self) -> int:
        """Bytes of all allocated ranges, each rounded up."""
        return sum(self._lengths.values())
