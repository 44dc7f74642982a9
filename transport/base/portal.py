"""An event loop in a thread of its own, for code that blocks (as anyio's BlockingPortal)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, TypeVar

from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused

CLEAN_UP_S = 30.0
"""Longest time that cancelled work may take to clean up, and the thread to end."""
_START_S = 30.0
"""The loop does nothing else when work that must go to its end is started."""

T = TypeVar("T")


class EventLoopThread:
    """Runs coroutines for other threads. Started when made; end it with `stop`.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether this is called on the loop's own thread."""
        return threading.current_thread() is self._thread

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float) -> T:
        """Carry work out on the loop, and wait for it.

        Raises:
            Refused: this is the loop's own thread.
            DeadlineExceeded: no result within timeout_s, or the loop stops.
        """
        if self.is_current():
            work.close()
            raise Refused("blocking call", why="it was made on the event loop", hint="use async methods")
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(min(timeout_s, threading.TIMEOUT_MAX))
        except FutureTimeout as error:
            if future.done():
                raise
            future.cancel()
            raise DeadlineExceeded("blocking call", why=f"no answer for {timeout_s} s") from error
        except CancelledError as error:
            raise DeadlineExceeded("blocking call", why="the event loop cancelled it: the role stops") from error
        except BaseException:
            future.cancel()  # after an interrupt nobody waits for the result
            raise

    def run_to_end(self, work: Coroutine[Any, Any, object], timeout_s: float) -> None:
        """Carry out work that enters or leaves something. Whatever ends the wait for it, it is cancelled and cleans up
        before this returns, so that the loop may be stopped."""

        async def start() -> asyncio.Task[object]:
            return asyncio.create_task(work)

        async def result(task: asyncio.Task[object]) -> None:
            # Cancelling this leaves the task alone.
            await asyncio.wait([task])
            task.result()

        async def end(task: asyncio.Task[object]) -> None:
            task.cancel()
            await asyncio.wait([task], timeout=CLEAN_UP_S)

        try:
            task = self.run(start(), _START_S)
        except Refused:
            work.close()  # it was never begun
            raise
        try:
            self.run(result(task), timeout_s)
        except BaseException:
            self.run(end(task), 2 * CLEAN_UP_S)
            raise

    def stop(self) -> None:
        """Stop the loop and end the thread."""
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(CLEAN_UP_S)
        if not self._thread.is_alive():
            self.loop.close()
