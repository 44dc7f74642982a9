"""Wait for what other tasks, threads and processes do. The limit is for what hangs: no test judges by time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

WAIT_S = 120.0
PAUSE_S = 0.01


async def eventually(probe: Callable[[], Any]) -> Any:
    """Return the first true result of the probe."""
    end = time.monotonic() + WAIT_S
    while not (found := probe()):
        assert time.monotonic() < end, "waited in vain"
        await asyncio.sleep(PAUSE_S)
    return found


def eventually_blocking(probe: Callable[[], Any]) -> Any:
    """Return the first true result of the probe; for tests without an event loop."""
    end = time.monotonic() + WAIT_S
    while not (found := probe()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(PAUSE_S)
    return found
