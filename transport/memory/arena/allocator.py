"""Which bytes of one slab are free: best fit, neighbours merged, no I/O."""

from __future__ import annotations

from bisect import bisect_left, insort

ALIGNMENT = 64
"""Bytes; extents begin at multiples of it."""


def aligned(nbytes: int) -> int:
    """The next multiple of ALIGNMENT."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class Heap:
    """Free extents of a slab, found by size (ties: the lowest offset) and merged by their ends.

    The smallest extent that is large enough is used, so that large ones stay whole; a search is a bisection.
    Large requests are cut from the end of an extent and small ones from its beginning: extents that come and go at
    different rates then do not lie between each other.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.free_bytes = nbytes
        self._by_size: list[tuple[int, int]] = [(nbytes, 0)]
        self._size_at: dict[int, int] = {0: nbytes}
        self._begin_of_end: dict[int, int] = {nbytes: 0}
        self._large = nbytes // 512

    @property
    def largest(self) -> int:
        """Bytes of the largest free extent."""
        return self._by_size[-1][0] if self._by_size else 0

    @property
    def free_extents(self) -> int:
        """How many free extents there are."""
        return len(self._by_size)

    @property
    def empty(self) -> bool:
        """Nothing is in use."""
        return self.free_bytes == self.nbytes

    def allocate(self, nbytes: int) -> int | None:
        """Offset of `nbytes` (a multiple of ALIGNMENT) that are in use from now on; None if there are none."""
        place = bisect_left(self._by_size, (nbytes, 0))
        if place == len(self._by_size):
            return None
        size, offset = self._by_size[place]
        self._remove(offset, size)
        self.free_bytes -= nbytes
        if size > nbytes:
            if nbytes >= self._large:
                self._insert(offset, size - nbytes)
                return offset + size - nbytes
            self._insert(offset + nbytes, size - nbytes)
        return offset

    def free(self, offset: int, nbytes: int) -> None:
        """These bytes, given out before, are free again."""
        self.free_bytes += nbytes
        before = self._begin_of_end.get(offset)
        after = self._size_at.get(offset + nbytes)
        if after is not None:
            self._remove(offset + nbytes, after)
            nbytes += after
        if before is not None:
            size = self._size_at[before]
            self._remove(before, size)
            offset, nbytes = before, nbytes + size
        self._insert(offset, nbytes)

    def _insert(self, offset: int, size: int) -> None:
        insort(self._by_size, (size, offset))
        self._size_at[offset] = size
        self._begin_of_end[offset + size] = offset

    def _remove(self, offset: int, size: int) -> None:
        del self._by_size[bisect_left(self._by_size, (size, offset))]
        del self._size_at[offset]
        del self._begin_of_end[offset + size]
