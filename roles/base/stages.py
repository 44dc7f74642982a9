"""Print the progress of long work before the run has a screen: what is being done, and for how long."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from relax_rt.roles.models.cache import say

REPEAT_S = 10.0


@contextmanager
def stage(what: str, repeat_s: float = REPEAT_S) -> Iterator[None]:
    """Print to standard error what the block does when it starts, and again every `repeat_s` seconds."""
    say(f"{what}…")
    began, over = time.monotonic(), threading.Event()

    def repeat() -> None:
        while not over.wait(repeat_s):
            say(f"{what}… {time.monotonic() - began:.0f} s so far")

    thread = threading.Thread(target=repeat, name="relax-stage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
