"""Sees that an event loop does not answer, and names what blocks it: a thread that asks it again and again."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from relax_rt.roles.agentic.apart import users

BLOCKED_S = 5.0
"""A loop that does not answer for so long is blocked."""
EVERY_S = 1.0


class LoopWatch:
    """Use it as a context manager, in the loop's own thread.

    Args:
        told: is called in the watching thread, once each time the loop is blocked, with the task that blocks it (None:
            no task does) and the `file:line` that it is at, in the user's code if there is any.
        over: the same once it answers again, with the seconds that it did not.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        told: Callable[[asyncio.Task[Any] | None, str], None],
        over: Callable[[float], None] = lambda seconds: None,
        after_s: float | None = None,
    ) -> None:
        self._loop, self._told, self._over = loop, told, over
        self._after_s = BLOCKED_S if after_s is None else after_s
        self._thread = threading.get_ident()
        self._ended = threading.Event()

    def __enter__(self) -> LoopWatch:
        threading.Thread(target=self._watch, name="relax-loop-watch", daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(EVERY_S, self._after_s)):
            answered = threading.Event()
            try:
                self._loop.call_soon_threadsafe(answered.set)
            except RuntimeError:
                # The loop is closed.
                return
            if answered.wait(self._after_s) or self._ended.is_set():
                continue
            seconds = self._after_s
            self._told(asyncio.current_task(self._loop), self._line())
            while not answered.wait(EVERY_S) and not self._ended.is_set():
                seconds += EVERY_S
            self._over(seconds)

    def _line(self) -> str:
        frame: FrameType | None = sys._current_frames().get(self._thread)
        lines: list[tuple[str, int]] = []
        while frame is not None:
            lines.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        return users(lines[::-1])
