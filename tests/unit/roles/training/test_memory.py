"""What was freed is given back where it lies between blocks that stay."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys

import pytest

from relax_rt.roles.models.heap import GROWTH_BYTES, HeapTrimmer, resident_bytes
from relax_rt.supervision.role_process import KEEP_PAGES

HOLES = """
import numpy as np
from relax_rt.roles.models.heap import trim_heap

def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20

large, pins = [], []
for _ in range(10):
    large.append(np.ones(20 << 20, np.uint8))
    pins.append(np.ones(1000))
large.clear()
held = rss()
trim_heap()
print(held, rss())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library")
def test_holes_between_blocks_that_stay_are_given_back() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HOLES],
        env=os.environ | KEEP_PAGES,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    held, left = map(int, done.stdout.split())
    assert held > 200, "without it they are kept"
    assert left < held - 150


def test_what_steps_add_is_given_back_once_it_is_much() -> None:
    held, given = [0], []
    growth = HeapTrimmer(lambda: held[0], lambda: given.append(held[0]))
    # The second step has the moments, which stay: that is given back once, in vain, and is the measure then.
    steps = [1.0, 2.5, 2.5, 2.9, 3.4, 3.6, 2.6, 3.5, 3.7]
    at = []
    for number, gib in enumerate(steps):
        held[0] = int(gib * (1 << 30))
        growth.after_step()
        at += [number] * (len(given) - len(at))
    assert GROWTH_BYTES == 1 << 30 and at == [1, 5, 8]
    assert resident_bytes() > 1 << 20
