"""Offers of many callers go out together: what is put while one message is under way makes the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.transport.errors import Refused
from relax_rt.transport.queue.api import SampleKey

MAX_ROWS = 2048
"""Samples of one message."""
MAX_BYTES = 4 << 20
"""Payload of one message, beyond a single caller's: it is copied on the event loop."""
MAX_PENDING = 65_536
"""Samples that wait to be sent; beyond it callers wait here."""

Rows = Sequence[Mapping[str, Any]]
Send = Callable[[Rows, list[int], Sequence[float]], Awaitable[list[int]]]


class Parcel(msgspec.Struct):
    """What one caller puts: rows, the sizes of the groups they make, their priorities."""

    rows: Rows
    groups: list[int]
    priorities: Sequence[float]
    nbytes: int
    answer: asyncio.Future[list[int]]


class Outbox:
    """Sends parcels in order, as many together as there are.

    Args:
        send: puts rows and answers with the ids of their groups.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parcels: deque[Parcel] = deque()
        self._pending = 0
        self._wanted = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.messages = 0
        self.rows = 0

    async def put(self, rows: Rows, groups: list[int], priorities: Sequence[float], nbytes: int) -> list[SampleKey]:
        """Send rows that make groups of these sizes, about `nbytes` in all; answers with their keys."""
        while self._pending >= MAX_PENDING:
            self._room.clear()
            await self._room.wait()
        parcel = Parcel(rows, groups, priorities, nbytes, asyncio.get_running_loop().create_future())
        self._parcels.append(parcel)
        self._pending += len(rows)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        self._wanted.set()
        # A caller that is cancelled gives up the answer; its samples go their way.
        ids = await asyncio.shield(parcel.answer)
        return [SampleKey(id_, member) for id_, size in zip(ids, groups, strict=True) for member in range(size)]

    async def _run(self) -> None:
        while True:
            if not self._parcels:
                self._wanted.clear()
                await self._wanted.wait()
            parcels = self._next()
            try:
                await self._deliver(parcels)
            finally:
                self._pending -= sum(len(parcel.rows) for parcel in parcels)
                self._room.set()
                for parcel in parcels:
                    # Only when this task is cancelled: close() is under way.
                    if not parcel.answer.done():
                        parcel.answer.cancel()

    def _next(self) -> list[Parcel]:
        parcels = [self._parcels.popleft()]
        rows, nbytes = len(parcels[0].rows), parcels[0].nbytes
        while self._parcels:
            rows, nbytes = rows + len(self._parcels[0].rows), nbytes + self._parcels[0].nbytes
            if rows > MAX_ROWS or nbytes > MAX_BYTES:
                break
            parcels.append(self._parcels.popleft())
        return parcels

    async def _deliver(self, parcels: list[Parcel]) -> None:
        rows = [row for parcel in parcels for row in parcel.rows]
        groups = [size for parcel in parcels for size in parcel.groups]
        priorities = [priority for parcel in parcels for priority in parcel.priorities]
        self.messages += 1
        self.rows += len(rows)
        (ids,) = await asyncio.gather(self._send(rows, groups, priorities), return_exceptions=True)
        if isinstance(ids, Refused) and len(parcels) > 1:
            # One of them is at fault, and only its own caller should hear of it.
            for parcel in parcels:
                await self._deliver([parcel])
            return
        if isinstance(ids, BaseException):
            for parcel in parcels:
                _fail(parcel, ids)
            return
        at = 0
        for parcel in parcels:
            if not parcel.answer.done():
                parcel.answer.set_result(ids[at : at + len(parcel.groups)])
            at += len(parcel.groups)

    async def close(self) -> None:
        """Stop; what was not sent is given up."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for parcel in self._parcels:
            parcel.answer.cancel()
        self._parcels.clear()


def _fail(parcel: Parcel, error: BaseException) -> None:
    if not parcel.answer.done():
        parcel.answer.set_exception(error)
        # Also read when its caller has gone.
        parcel.answer.exception()
