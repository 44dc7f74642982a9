"""Puts of a client: copies into its arena as room comes free, and messages that carry many callers' samples together.

`PayloadWriter` copies, `PutBatcher` joins what is put while one message is under way, `GroupPuts` sends whole groups.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.memory.arena import ArenaWriter, PlacedBlock
from relax_rt.transport.memory.fields import (
    Field,
    Sizes,
    check_columns,
    check_row,
    check_sizes,
    column_sizes,
    row_sizes,
)
from relax_rt.transport.memory.refs import Extent, extents_in
from relax_rt.transport.queue.ledger.messages import BlockPut, GroupsPut, RowPut, SampleKey, VersionSpan
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, RelaxError, StaleEpoch

PUT_WAIT_S = 600.0
"""Default time that a put of groups waits for room."""
MAX_ROWS = 2048
"""Samples of one message."""
MAX_BYTES = 4 << 20
"""Payload of one message, beyond a single caller's: it is copied on the event loop."""
MAX_PENDING = 65_536
"""Samples that wait to be sent; beyond it callers wait here."""
COPIES_AT_ONCE = 4
"""Copies under way together; they are bound by memory, and wait for nothing."""
_FIRST_SLICE_S, _SLICE_S = 0.1, 1.0
_POLL_S, _LONGEST_POLL_S = 0.002, 0.1
_STEPS = 8
_THREAD_BYTES = 8 << 20
"""A copy of more than this leaves the event loop."""

T = TypeVar("T")
Rows = Sequence[Mapping[str, Any]]
Until = Callable[[], float]
"""Time of the event loop until which to wait; it may change on the way."""
Places = list[tuple[PlacedBlock, list[int]]]
"""Blocks, and which of the rows put lie in each."""
SendGroups = Callable[[list[BlockPut], list[int], float], Awaitable[GroupsPut]]
"""Puts, the sizes of their groups, and how long the broker may wait for room."""
SendRows = Callable[[Rows, list[int], Sequence[float], Until], Awaitable[list[int]]]


def puts_of(
    places: Places,
    keys: Sequence[SampleKey],
    *,
    versions: Sequence[list[VersionSpan]] | None = None,
    priorities: Sequence[float] | None = None,
    version: int = -1,
) -> list[BlockPut]:
    """Make puts of placed rows; each row belongs to the sample whose key stands at its index."""

    def put(placed: PlacedBlock, row: int, i: int) -> RowPut:
        spans, priority = versions[i] if versions else [], priorities[i] if priorities else 0.0
        return RowPut(keys[i], row, placed.lengths[row], spans, priority)

    return [
        BlockPut(placed.block, [put(placed, row, i) for row, i in enumerate(indices)], placed.blobs, version)
        for placed, indices in places
    ]


class CopyThreads:
    """Threads of a client's own for copies that would hold the event loop up.

    The loop's default threads will not do: all of them may be waiting for blocking calls of this client, which then
    wait for a thread.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(COPIES_AT_ONCE, thread_name_prefix="relax-queue")
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
        """Accept no more work; running copies finish."""
        self._closed = True
        self._executor.shutdown(wait=False)


class PayloadWriter:
    """Copies into an arena, waiting when it is full.

    Args:
        arena: of this incarnation.
        collect: asks the broker for extents that came free, and says how many bytes are missing.
        reasons: where waits are reported.
        threads: where large copies are made.
        wait_s: how long to wait where nothing else is said.
        length_field: the column whose length counts as a sample's tokens.
        max_bytes: of one sample; 0: any.
    """

    def __init__(
        self,
        arena: ArenaWriter,
        collect: Callable[[int], Awaitable[list[Extent]]],
        reasons: WaitReasons,
        threads: CopyThreads,
        wait_s: float,
        length_field: str,
        max_bytes: int,
    ) -> None:
        self._arena, self._collect, self._reasons, self._threads = arena, collect, reasons, threads
        self._wait_s, self._length_field, self._max_bytes = wait_s, length_field, max_bytes

    async def rows(self, rows: Rows, until: Until | None = None) -> Places:
        """Copy rows.

        Raises:
            OutOfSpace: there was no room in time; nothing was put.
            Refused: a value cannot be put, or the arena could never hold them.
        """
        # Estimate all rows by the first: this only decides where the copy runs.
        nbytes = nbytes_of(rows[0]) * len(rows)
        places = await self._place(lambda: self._arena.put_rows(rows, length_field=self._length_field), nbytes, until)
        self._check_size([placed for placed, _ in places], lambda: row_sizes(rows))
        return places

    async def columns(self, columns: Mapping[str, Any], until: Until) -> PlacedBlock:
        """Copy whole columns; raises as `rows` does."""

        def put() -> Places:
            return [(self._arena.put_columns(columns, length_field=self._length_field), [])]

        ((placed, _),) = await self._place(put, nbytes_of(columns), until)
        self._check_size([placed], lambda: column_sizes(columns, placed.block.rows))
        return placed

    def _check_size(self, places: list[PlacedBlock], sizes: Callable[[], Iterable[Sizes]]) -> None:
        """Only where an extent is larger than a sample may be, samples are looked at one by one."""
        extents = [extent for placed in places for extent in placed.extents()]
        if not self._max_bytes or all(extent.nbytes <= self._max_bytes for extent in extents):
            return
        try:
            check_sizes(sizes(), self._max_bytes)
        except Refused:
            self.free(extents)
            raise

    async def _place(self, put: Callable[[], Places], nbytes: int, until: Until | None) -> Places:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._wait_s
        delay_s = _POLL_S
        with self._reasons.wait() as wait:
            while True:
                try:
                    return put() if nbytes < _THREAD_BYTES else await self._threads.run(put)
                except OutOfSpace as error:
                    if loop.time() >= (deadline if until is None else until()):
                        raise
                    wait(str(error))
                # Room is made in larger steps than one put, so that not every one has to wait.
                freed = await self._collect(max(nbytes, self._arena.total_bytes // _STEPS))
                self.free(freed)
                delay_s = _POLL_S if freed else min(2 * delay_s, _LONGEST_POLL_S)
                if not freed:
                    await asyncio.sleep(delay_s)

    async def drained(self, wait_s: float) -> int:
        """Wait until no reader needs this memory; returns the bytes still in use after wait_s."""
        loop = asyncio.get_running_loop()
        deadline, delay_s = loop.time() + wait_s, _POLL_S
        with self._reasons.wait() as wait:
            while self._arena.used_bytes:
                self.free(await self._collect(0))
                if loop.time() >= deadline:
                    break
                wait(f"others have yet to read {self._arena.used_bytes} bytes of this process")
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_POLL_S)
        return self._arena.used_bytes

    def free(self, extents: Sequence[Extent]) -> None:
        """Free extents that no reader uses."""
        for extent in extents:
            self._arena.free(extent)


def nbytes_of(columns: Mapping[str, Any]) -> int:
    """About how large they are: the sum over those values that know it themselves."""
    return sum(int(getattr(value, "nbytes", 0)) for value in columns.values())


class PendingPut(msgspec.Struct):
    """The put of one caller: rows, sizes of their groups, priorities, and the deadline."""

    rows: Rows
    groups: list[int]
    priorities: Sequence[float]
    nbytes: int
    deadline: float
    answer: asyncio.Future[list[int]]


class PutBatcher:
    """Sends the puts of many callers in order, as many in one message as have come while the last was under way.

    A message costs the broker a journal record and both sides a turn of their event loops, whatever is in it. So a put
    never waits for others to come, but never goes alone while one is under way: the busier the broker, the larger the
    messages.

    Args:
        send: puts rows and answers with the ids of their groups; OutOfSpace if there was no room in time.
    """

    def __init__(self, send: SendRows) -> None:
        self._send = send
        self._waiting: deque[PendingPut] = deque()
        self._pending = 0
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
            try:
                async with asyncio.timeout_at(deadline):
                    while self._pending >= MAX_PENDING and not self._closed:
                        self._room.clear()
                        await self._room.wait()
            except TimeoutError:
                raise OutOfSpace(
                    "put", why=f"{self._pending} samples of this process wait to be sent already"
                ) from None
        if self._closed:
            raise _closed()
        put = PendingPut(rows, groups, priorities, nbytes, deadline, loop.create_future())
        self._waiting.append(put)
        self._pending += len(rows)
        if self._task is None:
            self._task = loop.create_task(self._run())
        # A caller that is cancelled gives up the answer; its samples go their way.
        ids = await put.answer
        if len(ids) == len(rows):
            return [SampleKey(id_, 0) for id_ in ids]
        return [SampleKey(id_, member) for id_, size in zip(ids, groups, strict=True) for member in range(size)]

    async def _run(self) -> None:
        """Send until nothing waits: what comes while a message is under way goes with the next one."""
        try:
            while self._waiting:
                puts = self._next()
                try:
                    await self._deliver(puts)
                except asyncio.CancelledError:
                    _fail(puts, _closed(": it was on its way and may have been put"))
                    raise
                finally:
                    self._settle(puts)
        finally:
            self._task = None

    async def _deliver(self, puts: list[PendingPut]) -> None:
        while puts:
            puts = await self._sent(puts)

    def _settle(self, puts: list[PendingPut]) -> None:
        """Make room for what these took of the pending samples."""
        self._pending -= sum(len(put.rows) for put in puts)
        self._room.set()

    def _next(self) -> list[PendingPut]:
        puts = [self._waiting.popleft()]
        rows, nbytes = len(puts[0].rows), puts[0].nbytes
        while self._waiting:
            rows, nbytes = rows + len(self._waiting[0].rows), nbytes + self._waiting[0].nbytes
            if rows > MAX_ROWS or nbytes > MAX_BYTES:
                break
            puts.append(self._waiting.popleft())
        return puts

    async def _sent(self, puts: list[PendingPut]) -> list[PendingPut]:
        """Send one message; answers with those that are to be sent once more."""
        rows, groups, priorities = puts[0].rows, puts[0].groups, puts[0].priorities
        if len(puts) > 1:
            rows = [row for put in puts for row in put.rows]
            groups = [size for put in puts for size in put.groups]
            priorities = [priority for put in puts for priority in put.priorities]
        self.messages += 1

        def until() -> float:
            # Those behind them wait for the same room.
            return min(put.deadline for queue in (puts, self._waiting) for put in queue)

        try:
            ids = await self._send(rows, groups, priorities, until)
        except OutOfSpace as error:
            return self._without_the_late(puts, error)
        except Exception as error:  # noqa: BLE001 - whatever a value raises goes to whoever put it
            if len(puts) == 1 or not _of_one(error):
                _fail(puts, error)
                return []
        else:
            self.rows += len(rows)
            _answer(puts, ids)
            return []
        # Only the caller of the bad put should get the error.
        for put in puts:
            await self._deliver([put])
        return []

    def _without_the_late(self, puts: list[PendingPut], error: OutOfSpace) -> list[PendingPut]:
        """There was no room: fail those who cannot wait longer, and keep the others."""
        now = asyncio.get_running_loop().time()
        behind = [put for put in self._waiting if put.deadline <= now]
        self._waiting = deque(put for put in self._waiting if put.deadline > now)
        late = [put for put in puts if put.deadline <= now]
        if not behind and not late:
            # It is not that they waited too long.
            late = puts
        _fail([*late, *behind], error)
        self._settle(behind)
        return [put for put in puts if not put.answer.done()]

    async def close(self) -> None:
        """Stop; fail what was not sent, and who waits for room."""
        self._closed = True
        self._room.set()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        _fail([*self._waiting], _closed())
        self._settle([*self._waiting])
        self._waiting.clear()


def _closed(more: str = "") -> Refused:
    return Refused("put", why="this end of the queue was closed" + more, hint="put before you leave the queue")


def _of_one(error: BaseException) -> bool:
    """Whether one of several puts is at fault. What is no RelaxError came of a value, before anything was sent."""
    if isinstance(error, RelaxError):
        return isinstance(error, Refused) and not isinstance(error, StaleEpoch)
    return isinstance(error, Exception)


def _answer(puts: list[PendingPut], ids: list[int]) -> None:
    at = 0
    for put in puts:
        if not put.answer.done():
            put.answer.set_result(ids[at : at + len(put.groups)])
        at += len(put.groups)


def _fail(puts: Sequence[PendingPut], error: BaseException) -> None:
    for put in puts:
        if not put.answer.done():
            put.answer.set_exception(error)
            # Also read when its caller has gone.
            put.answer.exception()


class GroupPuts:
    """One client's puts of samples that no ticket was drawn for.

    Args:
        send: puts to the broker.
        payload: where payload goes.
        fields: declared columns; none: any.
        reasons: where waits are reported.
    """

    def __init__(
        self, send: SendGroups, payload: PayloadWriter, fields: Mapping[str, Field], reasons: WaitReasons
    ) -> None:
        self._send, self._payload, self._fields, self._reasons = send, payload, fields, reasons
        self.batcher = PutBatcher(self._put_rows)

    async def rows(
        self, rows: Rows, groups: list[int] | None, priorities: Sequence[float] | None, wait_s: float
    ) -> list[SampleKey]:
        """Put samples, each a mapping from field to value. For the arguments see QueueClient.put."""
        sizes = groups or [1] * len(rows)
        if sum(sizes) != len(rows) or not rows:
            raise Refused(f"put of {len(rows)} samples", why=f"its groups have {sum(sizes)} members")
        for row in rows:
            if type(row) is not dict and not isinstance(row, Mapping):
                raise Refused(
                    f"put of {len(rows)} samples",
                    why=f"one is a {type(row).__name__}",
                    hint="a sample is a mapping from field to value",
                )
        _check_priorities(len(rows), priorities)
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        nbytes = nbytes_of(rows[0]) * len(rows)
        return await self.batcher.put(rows, sizes, priorities or [0.0] * len(rows), nbytes, wait_s)

    async def _put_rows(self, rows: Rows, groups: list[int], priorities: Sequence[float], until: Until) -> list[int]:
        placed = await self._payload.rows(rows, until)
        if len(placed) == 1 and not any(priorities):
            # One block whose rows are in order needs no object per sample on the wire.
            return await self._put([_in_order(placed[0][0])], groups, until)
        keys = [SampleKey(n, member) for n, size in enumerate(groups) for member in range(size)]
        return await self._put(puts_of(placed, keys, priorities=priorities), groups, until)

    async def columns(
        self, columns: Mapping[str, Any], group: bool, priorities: Sequence[float] | None, wait_s: float
    ) -> list[SampleKey]:
        """Put samples as columns. For the arguments see QueueClient.put."""
        if self._fields:
            columns = check_columns(self._fields, columns)
        deadline = asyncio.get_running_loop().time() + wait_s
        placed = await self._payload.columns(columns, lambda: deadline)
        n, put = placed.block.rows, _in_order(placed)
        if priorities is not None:
            try:
                _check_priorities(n, priorities)
            except Refused:
                self._payload.free(placed.extents())
                raise
            keys = [SampleKey(0, i) if group else SampleKey(i, 0) for i in range(n)]
            (put,) = puts_of([(placed, list(range(n)))], keys, priorities=priorities)
        ids = await self._put([put], [n] if group else [1] * n, lambda: deadline)
        return [SampleKey(ids[0], i) if group else SampleKey(ids[i], 0) for i in range(n)]

    async def _put(self, puts: list[BlockPut], groups: list[int], until: Until) -> list[int]:
        loop = asyncio.get_running_loop()
        # The first answer comes soon, and has the reason of a wait.
        slice_s = _FIRST_SLICE_S
        try:
            with self._reasons.wait() as wait:
                while True:
                    answer = await self._send(puts, groups, min(max(until() - loop.time(), 0.0), slice_s))
                    if not answer.waiting_on:
                        self._payload.free(answer.freed)
                        return answer.groups
                    wait(answer.waiting_on)
                    if loop.time() >= until():
                        raise OutOfSpace(f"put of {sum(groups)} samples", why=answer.waiting_on)
                    slice_s = _SLICE_S
        except (Refused, OutOfSpace):
            # Only such an answer guarantees that no reader has the extents.
            self._payload.free(extents_in(puts))
            raise


def _in_order(placed: PlacedBlock) -> BlockPut:
    """The put of a block whose rows are the samples of its groups, in order."""
    lengths = placed.lengths
    return BlockPut(placed.block, [], placed.blobs, lengths=lengths if max(lengths) >= 0 else [])


def _check_priorities(n: int, priorities: Sequence[float] | None) -> None:
    if priorities is not None and len(priorities) != n:
        raise Refused(f"put of {n} samples", why=f"it comes with {len(priorities)} priorities")


class WaitReasons:
    """Reasons of the waits under way.

    Args:
        on_change: gets the reason of the wait that began last, and an empty string when none is left.
    """

    def __init__(self, on_change: Callable[[str], None] | None = None) -> None:
        self._on_change = on_change
        self._waits: dict[object, str] = {}
        self.current = ""
        """Of the wait that began last; empty when there is none."""

    def wait(self) -> Wait:
        """A wait that may come: it begins with its first reason."""
        return Wait(self)

    def tell(self, wait: object, reason: str) -> None:
        """The reason of a wait is this now; empty: it is over."""
        if reason:
            self._waits[wait] = reason
        elif self._waits.pop(wait, None) is None:
            return
        current = next(reversed(self._waits.values()), "")
        if current != self.current:
            self.current = current
            if self._on_change is not None:
                self._on_change(current)


class Wait:
    """One wait; called with its reason, and with an empty string when it is over."""

    __slots__ = ("_reasons",)

    def __init__(self, reasons: WaitReasons) -> None:
        self._reasons = reasons

    def __call__(self, reason: str) -> None:
        self._reasons.tell(self, reason)

    def __enter__(self) -> Wait:
        return self

    def __exit__(self, *_: object) -> None:
        self("")
