"""What this machine has."""

from __future__ import annotations

import os

MIB = 1 << 20


def physical_mib() -> int:
    """Its memory, whoever uses it now."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
