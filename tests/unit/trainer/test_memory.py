"""What was freed is given back where it lies between blocks that stay."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from relax_rt.supervision.process import KEEP_PAGES

HOLES = """
import numpy as np
from relax_rt.roles.trainers.memory import give_back

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

large, pins = [], []
for _ in range(10):
    large.append(np.ones(20 << 20, np.uint8))
    pins.append(np.ones(1000))
large.clear()
held = rss()
give_back()
print(held, rss())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_holes_between_blocks_that_stay_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES],
        env=os.environ | KEEP_PAGES,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    held, left = map(int, done.stdout.split())
    assert held > 200, "without it they are kept"
    assert left < held - 150
