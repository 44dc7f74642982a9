"""The scripted engine of tools/bench/agentic.py, as all systems have it: needs nothing but the standard library."""

from __future__ import annotations

import asyncio
import random
import time

TOKEN = "bench-bench-bench-bench-bench-bench"
"""Of the run; the proxy asks for none."""
ANSWER = "I think that it is forty-two, but I may be wrong."
SIGMA = 0.9
"""Of the logarithm of latencies: the longest percent takes at least eight times the median."""


class Slots:
    """So many calls sleep at once, each as long as its name says; the others wait for a slot.

    Args:
        median_s: of the latencies, seconds.

    Attributes:
        log: of each call that had a slot: its name, when it had it and when it gave it back (monotonic seconds).
    """

    def __init__(self, slots: int, median_s: float) -> None:
        self._median_s = median_s
        self._room = asyncio.Semaphore(slots)
        self.busy = 0
        self.log: list[tuple[str, float, float]] = []

    async def work(self, name: str) -> None:
        """Be at work on the call of this name."""
        async with self._room:
            self.busy += 1
            began = time.monotonic()
            try:
                await asyncio.sleep(self._median_s * random.Random(name).lognormvariate(0, SIGMA))
            finally:
                self.log.append((name, began, time.monotonic()))
                self.busy -= 1


def name_of(text: str) -> str:
    """The call's name stands in the last message: ``call <name>.``"""
    return text.rpartition("call ")[2].partition(".")[0]
