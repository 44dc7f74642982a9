"""Shared memory as cells that remember who wrote them last: an owner uses freed extents again at once."""

from __future__ import annotations

from itertools import count

from relax_rt.transport.memory.refs import Extent, owner_key
from relax_rt.transport.rpc.identity import Incarnation

CELL = 64
"""Bytes."""


class Slab:
    """Cells of a file; who has mapped it reads it also after it was unlinked."""

    def __init__(self, cells: int) -> None:
        self.cells: list[int] = [0] * cells


class Memory:
    """The slabs of a node, and what was written under each number."""

    def __init__(self) -> None:
        self.slabs: dict[str, Slab] = {}
        self.written: dict[int, list[str]] = {}
        self._n = count(1)

    def make(self, name: str, cells: int) -> Slab:
        self.slabs[name] = Slab(cells)
        return self.slabs[name]

    def write(self, slab: Slab, extent: Extent, rows: list[str]) -> None:
        n = next(self._n)
        self.written[n] = rows
        first = extent.offset // CELL
        slab.cells[first : first + extent.nbytes // CELL] = [n] * (extent.nbytes // CELL)

    def read(self, slab: Slab, extent: Extent) -> list[str] | None:
        """The rows that lie there; None if others were written over parts of them."""
        first, size = extent.offset // CELL, extent.nbytes // CELL
        there = slab.cells[first : first + size]
        return self.written.get(there[0]) if len(there) == size and len(set(there)) == 1 else None

    def wipe(self) -> None:
        """The node is gone, and its shared memory with it."""
        self.slabs.clear()


class Full(Exception):
    """No room for an extent."""


class Arena:
    """One incarnation's own slab. What came free last is used again first, so that mistakes show."""

    def __init__(self, memory: Memory, who: Incarnation, cells: int) -> None:
        self.name = f"{owner_key(who)}-1.slab"
        self._memory, self._slab = memory, memory.make(self.name, cells)
        self._used: dict[int, int] = {}
        self._hints: list[int] = []
        self._cells = cells

    def put(self, rows: list[str], cells: int) -> Extent:
        """Write rows into an extent.

        Raises:
            Full: nothing is free that is as large.
        """
        for first in [*reversed(self._hints), *range(self._cells - cells + 1)]:
            if self._is_free(first, cells):
                self._used[first] = cells
                extent = Extent(self.name, first * CELL, cells * CELL)
                self._memory.write(self._slab, extent, rows)
                return extent
        raise Full

    def _is_free(self, first: int, cells: int) -> bool:
        if first + cells > self._cells:
            return False
        return all(first + cells <= at or at + size <= first for at, size in self._used.items())

    def free(self, extent: Extent) -> bool:
        """Whether the extent was in use."""
        first = extent.offset // CELL
        self._hints = [*self._hints[-8:], first]
        return self._used.pop(first, 0) * CELL == extent.nbytes
