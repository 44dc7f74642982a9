"""Memory that is free but held: see `give_back`."""

from __future__ import annotations

import ctypes


def give_back() -> None:
    """Give the pages of freed blocks back to the system, as far as the C library can.

    A role keeps what it has freed, for fresh pages are dear (KEEP_PAGES). But small blocks that stay, as the kernels
    that are kept for each new shape, fall into the holes of large ones, which then fit no more: the heap grows by about
    one large block a step, for ever. Done once a checkpoint, its free part costs no memory.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
