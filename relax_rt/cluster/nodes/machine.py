"""What this machine offers to the roles of a run: GPUs and memory."""

from __future__ import annotations

import os
import re
from pathlib import Path

MIB = 1 << 20


def count_gpus() -> int:
    """NVIDIA devices, or as many of them as CUDA_VISIBLE_DEVICES lets through. Loads no driver."""
    present = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return len(present)
    return min(len(present), len([name for name in visible.split(",") if name.strip() not in ("", "-1")]))


def physical_mib() -> int:
    """Physical memory of the machine, whatever part of it is in use."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MIB
