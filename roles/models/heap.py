"""Returns freed heap pages to the system: for processes whose heap would grow for ever."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 1 << 30
"""Of a process between two times that it gives back: less often than once in some twenty steps, whose pages are fresh
then."""


def resident_bytes() -> int:
    """Return memory of this process that is its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def trim_heap() -> None:
    """Give the pages of freed blocks back to the system, as far as the C library can.

    A role keeps what it has freed, for fresh pages are dear (KEEP_PAGES). But small blocks that stay, as the kernels
    that are kept for each new shape, fall into the holes of large ones, which then fit no more: the heap grows by about
    one large block a step, for ever. Done once a checkpoint, its free part costs no memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Gives back what steps have added to the heap, once it is much, however far apart checkpoints are.

    Args:
        resident: what this process holds, bytes. give: gives back.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes, give: Callable[[], object] = trim_heap) -> None:
        self._resident, self._give = resident, give
        self._base: int | None = None

    def after_step(self) -> None:
        """Call it where a step has ended: all of them hold about as much there."""
        held = self._resident()
        if self._base is None:
            self._base = held
        elif held > self._base + GROWTH_BYTES:
            self._give()
            # What the next step holds is the measure from then on, whatever it needs.
            self._base = None
