"""The keyed store behind its interface: what the broker offers beside the queue's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from relax_rt.transport.compat.store import state as ev
from relax_rt.transport.compat.store.api import MAX_ROWS, Fetched, Found, Rows, Status, StoreConfig, Stored, Tags
from relax_rt.transport.compat.store.machine import Store
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.rpc.errors import Refused

T = TypeVar("T")
W = TypeVar("W", Found, Stored)


class Wait(Protocol):
    """Applies an event again and again until its answer waits on nothing or the time is over."""

    async def __call__(self, event: ev.StoreEvent, seq: int, wait_s: float, kind: type[W]) -> W: ...


class StoreDesk:
    """Implements StoreApi.

    Args:
        store: the store as it is now; only asked.
        apply: applies and journals an event of the caller, with its sequence number; gives the answer.
        wait: the same for a put or a sample, until there is room or a batch.
    """

    def __init__(
        self,
        store: Callable[[], Store],
        apply: Callable[[ev.StoreEvent, int], Any],
        wait: Wait,
    ) -> None:
        self._store, self._apply, self._wait = store, apply, wait

    def _answer(self, event: ev.StoreEvent, seq: int, kind: type[T]) -> T:
        answer = self._apply(event, seq)
        if not isinstance(answer, kind):
            raise Refused(f"call {seq}", why="another call had this number", hint="number changing calls anew")
        return answer

    async def store_configure(self, seq: int, config: StoreConfig) -> StoreConfig:
        """See StoreApi."""
        return self._answer(ev.Configure(config), seq, StoreConfig)

    async def store_config(self) -> StoreConfig | None:
        """See StoreApi."""
        return self._store().state.config

    async def store_put(
        self,
        seq: int,
        rows: Rows,
        new: int,
        block: BlockRef | None,
        blobs: list[BlobRef],
        tags: list[Tags],
        replace_tags: bool,
        wait_s: float,
    ) -> Stored:
        """See StoreApi."""
        if max(new, len(rows.keys), len(rows.indexes)) > MAX_ROWS:
            raise Refused(f"put of over {MAX_ROWS} rows", why="that is the limit of one call", hint="put fewer at once")
        return await self._wait(ev.Put(rows, new, block, blobs, tags, replace_tags), seq, wait_s, Stored)

    async def store_find(self, rows: Rows) -> Found:
        """See StoreApi."""
        return self._store().find(rows)

    async def store_get(self, seq: int, rows: Rows, fields: list[str] | None) -> Fetched:
        """See StoreApi."""
        return self._answer(ev.Get(rows, fields), seq, Fetched)

    async def store_unpin(self, seq: int, pins: list[int]) -> list[Extent]:
        """See StoreApi."""
        return list(self._answer(ev.Unpin(pins), seq, list))

    async def store_clear(self, seq: int, rows: Rows) -> list[Extent]:
        """See StoreApi."""
        return list(self._answer(ev.Clear(rows), seq, list))

    async def store_list(self, partition: str | None) -> dict[str, dict[str, Tags]]:
        """See StoreApi."""
        return self._store().list_keys(partition)

    async def store_partitions(self) -> list[str]:
        """See StoreApi."""
        return list(self._store().state.partitions)

    async def store_sample(
        self,
        seq: int,
        partition: str,
        task: str,
        fields: list[str],
        batch: int,
        rank: int | None,
        batch_index: int | None,
        wait_s: float,
    ) -> Found:
        """See StoreApi."""
        return await self._wait(ev.Sample(partition, task, fields, batch, rank, batch_index), seq, wait_s, Found)

    async def store_consumed(self, partition: str, task: str) -> Status:
        """See StoreApi."""
        return self._store().consumed(partition, task)

    async def store_produced(self, partition: str, fields: list[str]) -> Status:
        """See StoreApi."""
        return self._store().produced(partition, fields)

    async def store_reset(self, seq: int, partition: str, task: str | None) -> bool:
        """See StoreApi."""
        return self._answer(ev.Reset(partition, task), seq, bool)
