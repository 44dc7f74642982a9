"""Threads of a client's own, for work that would hold the event loop up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from relax_rt.transport.rpc.errors import Refused

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
        self._closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Carry out work that waits for nothing.

        Raises:
            Refused: this was closed. RuntimeError: the machine gives no further thread.
        """
        if self._closed:
            raise Refused("call of a client of the queue", why="the client was closed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        """What was begun goes to its end."""
        self._closed = True
        self._executor.shutdown(wait=False)
