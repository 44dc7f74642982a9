"""Arrays that outlive their lease: the broker is told when the last of them is gone."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any


class Pins:
    """Finished leases over whose memory arrays are still looked at.

    Args:
        unread: gets the leases of which the last array is gone.
    """

    def __init__(self, unread: Callable[[list[int]], None]) -> None:
        self._unread = unread
        self._views: dict[int, int] = {}
        self._done: list[int] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def __len__(self) -> int:
        return len(self._views)

    def keep(self, lease: int, roots: Sequence[weakref.ref[Any]]) -> None:
        """Watch what arrays over the lease's memory refer to (see LeasedBatch.finish)."""
        if not roots:
            return
        self._loop = asyncio.get_running_loop()
        alive = [root for ref in roots if (root := ref()) is not None]
        self._views[lease] = max(len(alive), 1)
        for root in alive:
            weakref.finalize(root, self._gone, lease).atexit = False
        if not alive:
            self._count(lease)

    def _gone(self, lease: int) -> None:
        """Called by the garbage collector, in any thread."""
        if self._loop is not None:
            # A loop that is closed has nobody to tell.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._count, lease)

    def _count(self, lease: int) -> None:
        self._views[lease] -= 1
        if self._views[lease]:
            return
        del self._views[lease]
        if not self._done and self._loop is not None:
            self._loop.call_soon(self._tell)
        self._done.append(lease)

    def _tell(self) -> None:
        leases, self._done = self._done, []
        self._unread(leases)
