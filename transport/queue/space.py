"""Room for what a client puts: copies go into its arena as soon as what others read there comes free."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from relax_rt.transport.memory.arena import Placed, Writer
from relax_rt.transport.memory.fields import Sizes, check_sizes, column_sizes, row_sizes
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.ledger.messages import Put, RowPut, SampleKey, VersionSpan
from relax_rt.transport.queue.reasons import Reasons
from relax_rt.transport.queue.threads import Threads
from relax_rt.transport.rpc.errors import OutOfSpace, Refused

_POLL_S, _LONGEST_POLL_S = 0.002, 0.1
_STEPS = 8
_THREAD_BYTES = 8 << 20
"""A copy of more than this leaves the event loop."""

Rows = Sequence[Mapping[str, Any]]
Until = Callable[[], float]
"""Time of the event loop until which to wait; it may change on the way."""
Places = list[tuple[Placed, list[int]]]
"""Blocks, and which of the rows put lie in each."""


def puts_of(
    places: Places,
    keys: Sequence[SampleKey],
    *,
    versions: Sequence[list[VersionSpan]] | None = None,
    priorities: Sequence[float] | None = None,
    version: int = -1,
) -> list[Put]:
    """Rows as they were placed, each told to be of the sample whose key stands at its index."""

    def put(placed: Placed, row: int, i: int) -> RowPut:
        spans, priority = versions[i] if versions else [], priorities[i] if priorities else 0.0
        return RowPut(keys[i], row, placed.lengths[row], spans, priority)

    return [
        Put(placed.block, [put(placed, row, i) for row, i in enumerate(indices)], placed.blobs, version)
        for placed, indices in places
    ]


class Space:
    """Copies into an arena, waiting when it is full.

    Args:
        arena: of this incarnation.
        collect: asks the broker for extents that came free, and says how many bytes are missing.
        reasons: where waits are told.
        threads: where large copies are made.
        wait_s: how long to wait where nothing else is said.
        length_field: the column whose length counts as a sample's tokens.
        max_bytes: of one sample; 0: any.
    """

    def __init__(
        self,
        arena: Writer,
        collect: Callable[[int], Awaitable[list[Extent]]],
        reasons: Reasons,
        threads: Threads,
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
        # All rows are taken to be as large as the first: it only decides where the copy runs.
        nbytes = nbytes_of(rows[0]) * len(rows)
        places = await self._place(lambda: self._arena.put_rows(rows, length_field=self._length_field), nbytes, until)
        self._check_size([placed for placed, _ in places], lambda: row_sizes(rows))
        return places

    async def columns(self, columns: Mapping[str, Any], until: Until) -> Placed:
        """Copy whole columns; raises as `rows` does."""

        def put() -> Places:
            return [(self._arena.put_columns(columns, length_field=self._length_field), [])]

        ((placed, _),) = await self._place(put, nbytes_of(columns), until)
        self._check_size([placed], lambda: column_sizes(columns, placed.block.rows))
        return placed

    def _check_size(self, places: list[Placed], sizes: Callable[[], Iterable[Sizes]]) -> None:
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
        """Wait until nobody needs what lies here any more; answers with the bytes of what is left after wait_s."""
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
        """Nobody reads these any more."""
        for extent in extents:
            self._arena.free(extent)


def nbytes_of(columns: Mapping[str, Any]) -> int:
    """About how large they are: what says so itself."""
    return sum(int(getattr(value, "nbytes", 0)) for value in columns.values())
