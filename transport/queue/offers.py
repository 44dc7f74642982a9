"""Puts of samples that no ticket was drawn for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from relax_rt.transport.memory.fields import Field, check_columns, check_row
from relax_rt.transport.memory.refs import extents_in
from relax_rt.transport.queue.ledger.messages import Offered, Put, SampleKey
from relax_rt.transport.queue.outbox import Outbox
from relax_rt.transport.queue.reasons import Reasons
from relax_rt.transport.queue.space import Rows, Space, Until, nbytes_of, puts_of
from relax_rt.transport.rpc.errors import OutOfSpace, Refused

OFFER_WAIT_S = 600.0
"""How long an offer waits for room, unless its caller says otherwise."""
_FIRST_SLICE_S, _SLICE_S = 0.1, 1.0

Call = Callable[[list[Put], list[int], float], Awaitable[Offered]]
"""Puts, the sizes of their groups, and how long the broker may wait for room."""


class Offers:
    """One client's offers.

    Args:
        call: offers to the broker.
        space: where payload goes.
        fields: declared columns; none: any.
        reasons: where waits are told.
    """

    def __init__(self, call: Call, space: Space, fields: Mapping[str, Field], reasons: Reasons) -> None:
        self._call, self._space, self._fields, self._reasons = call, space, fields, reasons
        self.outbox = Outbox(self._put_rows)

    async def rows(
        self, rows: Rows, groups: list[int] | None, priorities: Sequence[float] | None, wait_s: float
    ) -> list[SampleKey]:
        """See QueueClient.offer."""
        sizes = groups or [1] * len(rows)
        if sum(sizes) != len(rows) or not rows:
            raise Refused(f"offer of {len(rows)} samples", why=f"its groups have {sum(sizes)} members")
        for row in rows:
            if type(row) is not dict and not isinstance(row, Mapping):
                raise Refused(
                    f"offer of {len(rows)} samples",
                    why=f"one is a {type(row).__name__}",
                    hint="a sample is a mapping from field to value",
                )
        _check_priorities(len(rows), priorities)
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        nbytes = nbytes_of(rows[0]) * len(rows)
        return await self.outbox.put(rows, sizes, priorities or [0.0] * len(rows), nbytes, wait_s)

    async def _put_rows(self, rows: Rows, groups: list[int], priorities: Sequence[float], until: Until) -> list[int]:
        placed = await self._space.rows(rows, until)
        keys = [SampleKey(n, member) for n, size in enumerate(groups) for member in range(size)]
        return await self._offer(puts_of(placed, keys, priorities=priorities), groups, until)

    async def columns(
        self, columns: Mapping[str, Any], group: bool, priorities: Sequence[float] | None, wait_s: float
    ) -> list[SampleKey]:
        """See QueueClient.offer_columns."""
        if self._fields:
            columns = check_columns(self._fields, columns)
        deadline = asyncio.get_running_loop().time() + wait_s
        placed = await self._space.columns(columns, lambda: deadline)
        n, lengths = placed.block.rows, placed.lengths
        put = Put(placed.block, [], placed.blobs, lengths=lengths if max(lengths) >= 0 else [])
        if priorities is not None:
            try:
                _check_priorities(n, priorities)
            except Refused:
                self._space.free(placed.extents())
                raise
            keys = [SampleKey(0, i) if group else SampleKey(i, 0) for i in range(n)]
            (put,) = puts_of([(placed, list(range(n)))], keys, priorities=priorities)
        ids = await self._offer([put], [n] if group else [1] * n, lambda: deadline)
        return [SampleKey(ids[0], i) if group else SampleKey(ids[i], 0) for i in range(n)]

    async def _offer(self, puts: list[Put], groups: list[int], until: Until) -> list[int]:
        loop = asyncio.get_running_loop()
        # The first answer comes soon, and has the reason of a wait.
        slice_s = _FIRST_SLICE_S
        try:
            with self._reasons.wait() as wait:
                while True:
                    answer = await self._call(puts, groups, min(max(until() - loop.time(), 0.0), slice_s))
                    if not answer.waiting_on:
                        self._space.free(answer.freed)
                        return answer.groups
                    wait(answer.waiting_on)
                    if loop.time() >= until():
                        raise OutOfSpace(f"offer of {sum(groups)} samples", why=answer.waiting_on)
                    slice_s = _SLICE_S
        except (Refused, OutOfSpace):
            # Only after such an answer is it sure that nobody reads the extents.
            self._space.free(extents_in(puts))
            raise


def _check_priorities(n: int, priorities: Sequence[float] | None) -> None:
    if priorities is not None and len(priorities) != n:
        raise Refused(f"offer of {n} samples", why=f"it comes with {len(priorities)} priorities")
