"""Offers of many callers go out together: what is put while one message is under way makes the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from relax_rt.transport.queue.ledger.messages import SampleKey
from relax_rt.transport.queue.space import Rows, Until
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, RelaxError, StaleEpoch

MAX_ROWS = 2048
"""Samples of one message."""
MAX_BYTES = 4 << 20
"""Payload of one message, beyond a single caller's: it is copied on the event loop."""
MAX_PENDING = 65_536
"""Samples that wait to be sent; beyond it callers wait here."""

Send = Callable[[Rows, list[int], Sequence[float], Until], Awaitable[list[int]]]


class Parcel(msgspec.Struct):
    """What one caller puts: rows, the sizes of the groups they make, their priorities, and how long they may wait."""

    rows: Rows
    groups: list[int]
    priorities: Sequence[float]
    nbytes: int
    deadline: float
    answer: asyncio.Future[list[int]]


class Outbox:
    """Sends parcels in order, as many together as there are.

    Args:
        send: puts rows and answers with the ids of their groups; OutOfSpace if there was no room in time.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._parcels: deque[Parcel] = deque()
        self._pending = 0
        self._wanted = asyncio.Event()
        self._room = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self.messages = 0
        self.rows = 0

    async def put(
        self, rows: Rows, groups: list[int], priorities: Sequence[float], nbytes: int, wait_s: float
    ) -> list[SampleKey]:
        """Send rows that make groups of these sizes, about `nbytes` in all; answers with their keys.

        Raises:
            OutOfSpace: there was no room for wait_s; they were not put.
            Refused: it was closed; they were not put, or, as it then says, may have been.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        if self._pending >= MAX_PENDING:
            await self._wait_for_room(deadline)
        if self._closed:
            raise _closed()
        parcel = Parcel(rows, groups, priorities, nbytes, deadline, loop.create_future())
        self._parcels.append(parcel)
        self._pending += len(rows)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        self._wanted.set()
        # A caller that is cancelled gives up the answer; its samples go their way.
        ids = await asyncio.shield(parcel.answer)
        return [SampleKey(id_, member) for id_, size in zip(ids, groups, strict=True) for member in range(size)]

    async def _wait_for_room(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                while self._pending >= MAX_PENDING and not self._closed:
                    self._room.clear()
                    await self._room.wait()
        except TimeoutError:
            raise OutOfSpace("offer", why=f"{self._pending} samples of this process wait to be sent already") from None

    async def _run(self) -> None:
        while True:
            if not self._parcels:
                self._wanted.clear()
                await self._wanted.wait()
            parcels = self._next()
            try:
                await self._deliver(parcels)
            finally:
                # Only where this task is cancelled, by close(), is one without an answer.
                _fail(parcels, _closed(": it was on its way and may have been put"))
                self._settle(parcels)

    async def _deliver(self, parcels: list[Parcel]) -> None:
        while parcels:
            parcels = await self._sent(parcels)

    def _settle(self, parcels: list[Parcel]) -> None:
        """These are under way no more."""
        self._pending -= sum(len(parcel.rows) for parcel in parcels)
        self._room.set()

    def _next(self) -> list[Parcel]:
        parcels = [self._parcels.popleft()]
        rows, nbytes = len(parcels[0].rows), parcels[0].nbytes
        while self._parcels:
            rows, nbytes = rows + len(self._parcels[0].rows), nbytes + self._parcels[0].nbytes
            if rows > MAX_ROWS or nbytes > MAX_BYTES:
                break
            parcels.append(self._parcels.popleft())
        return parcels

    async def _sent(self, parcels: list[Parcel]) -> list[Parcel]:
        """Those of them that are to be sent once more."""
        rows = [row for parcel in parcels for row in parcel.rows]
        groups = [size for parcel in parcels for size in parcel.groups]
        priorities = [priority for parcel in parcels for priority in parcel.priorities]
        self.messages += 1
        until = self._until(parcels)
        (ids,) = await asyncio.gather(self._send(rows, groups, priorities, until), return_exceptions=True)
        if not isinstance(ids, BaseException):
            self.rows += len(rows)
            _answer(parcels, ids)
        elif isinstance(ids, OutOfSpace):
            return self._without_the_late(parcels, ids)
        elif len(parcels) > 1 and _of_one(ids):
            # Only its own caller should hear of it.
            for parcel in parcels:
                await self._deliver([parcel])
        else:
            _fail(parcels, ids)
        return []

    def _until(self, parcels: list[Parcel]) -> Until:
        # Those behind them wait for the same room.
        return lambda: min(parcel.deadline for queue in (parcels, self._parcels) for parcel in queue)

    def _without_the_late(self, parcels: list[Parcel], error: OutOfSpace) -> list[Parcel]:
        """There was no room: those who cannot wait longer are told, the others go on."""
        now = asyncio.get_running_loop().time()
        behind = [parcel for parcel in self._parcels if parcel.deadline <= now]
        self._parcels = deque(parcel for parcel in self._parcels if parcel.deadline > now)
        late = [parcel for parcel in parcels if parcel.deadline <= now]
        if not behind and not late:
            # It is not that they waited too long.
            late = parcels
        _fail([*late, *behind], error)
        self._settle(behind)
        return [parcel for parcel in parcels if not parcel.answer.done()]

    async def close(self) -> None:
        """Stop; what was not sent is given up, and who waits at the door is told."""
        self._closed = True
        self._room.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        _fail([*self._parcels], _closed())
        self._settle([*self._parcels])
        self._parcels.clear()


def _closed(more: str = "") -> Refused:
    return Refused("offer", why="this end of the queue was closed" + more, hint="put before you leave the queue")


def _of_one(error: BaseException) -> bool:
    """Whether one of several parcels is at fault. What is no RelaxError came of a value, before anything was sent."""
    if isinstance(error, RelaxError):
        return isinstance(error, Refused) and not isinstance(error, StaleEpoch)
    return isinstance(error, Exception)


def _answer(parcels: list[Parcel], ids: list[int]) -> None:
    at = 0
    for parcel in parcels:
        if not parcel.answer.done():
            parcel.answer.set_result(ids[at : at + len(parcel.groups)])
        at += len(parcel.groups)


def _fail(parcels: Sequence[Parcel], error: BaseException) -> None:
    for parcel in parcels:
        if not parcel.answer.done():
            parcel.answer.set_exception(error)
            # Also read when its caller has gone.
            parcel.answer.exception()
