"""Return freed heap pages to the system, for processes whose heap would grow without bound."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

GROWTH_BYTES = 1 << 30
"""Growth of a process between two trims: less than once in about twenty steps, which then get fresh pages."""


def resident_bytes() -> int:
    """Return memory of this process that is its own."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGESIZE")


def trim_heap() -> None:
    """Give the pages of freed blocks back to the system, as far as the C library can.

    A role keeps freed pages, because fresh ones are expensive (KEEP_PAGES). But small blocks that stay, as the kernels
    that are kept for each new shape, fall into the holes of large ones, which then fit no more: the heap grows by about
    one large block a step, without bound. Trimming once a checkpoint returns the free part.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HeapTrimmer:
    """Trims the heap once steps have added much to it, however far apart checkpoints are.

    Args:
        resident: resident bytes of this process. give: trims the heap.
    """

    def __init__(self, resident: Callable[[], int] = resident_bytes, give: Callable[[], object] = trim_heap) -> None:
        self._resident, self._give = resident, give
        self._base: int | None = None

    def after_step(self) -> None:
        """Call it at the end of a step, when the process holds about the same memory every time."""
        held = self._resident()
        if self._base is None:
            self._base = held
        elif held > self._base + GROWTH_BYTES:
            self._give()
            # The next step sets the new baseline.
            self._base = None
