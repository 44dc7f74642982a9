"""Threads of a client's own, for work that would hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from relax_rt.transport.errors import Refused

AT_ONCE = 4
"""Copies and plans under way together; they are bound by memory, and wait for nothing."""

T = TypeVar("T")


class Threads:
    """Carries work out beside the event loop.

    The loop's own threads will not do: all of them may be waiting for calls of this client (see SyncQueue), which then
    wait for a thread.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="relax-queue")

    async def run(self, work: Callable[[], T]) -> T:
        """Carry out work that waits for nothing.

        Raises:
            Refused: this was closed.
        """
        try:
            working = asyncio.get_running_loop().run_in_executor(self._executor, work)
        except RuntimeError as error:
            raise Refused("call of a client of the queue", why="the client was closed") from error
        return await working

    def close(self) -> None:
        """What was begun goes to its end."""
        self._executor.shutdown(wait=False)
