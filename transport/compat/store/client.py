"""The keyed store for processes on the broker's node: its calls, and the memory that goes with them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from relax_rt.transport.base.calls import Calls
from relax_rt.transport.base.watch import node_name
from relax_rt.transport.compat.store.api import Found, Rows, StoreApi, StoreConfig, Stored, Tags
from relax_rt.transport.compat.store.reading import Reading
from relax_rt.transport.memory.arena import Placed, Reader, Writer
from relax_rt.transport.memory.refs import Extent
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.hosting import RUN_ID, find
from relax_rt.transport.queue.ledger.messages import Membership
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import OutOfSpace, Refused, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

CALL_S = 30.0
SLICE_S = 10.0
"""Long waits are made of calls of this length."""
ROOM_SLICE_S = 1.0
"""Waits for room: what a dead process held comes free without a word."""
SPACE_POLL_S = 0.02
UNPIN_AFTER_S = 0.002
"""Unpins that come within this time go out together."""
THREAD_BYTES = 8 << 20
"""A copy of more than this leaves the event loop."""
SLAB_BYTES = 64 << 20

T = TypeVar("T")


class StoreClient:
    """A process's part in the keyed store. Make it with `connect`; every method is for its event loop.

    Args:
        client: connected to the broker as the member.
        membership: what the broker said on joining.
        capacity_bytes: shared memory that this process may put into.
        patience_s: how long a broker that cannot be reached is asked again.
        space_wait_s: how long a put waits for memory to come free, its own and that of the queue.
    """

    def __init__(
        self,
        client: rpc.Client,
        membership: Membership,
        *,
        capacity_bytes: int,
        patience_s: float = 60.0,
        space_wait_s: float = 60.0,
    ) -> None:
        self.who = membership.who
        self.waiting_on = ""
        """Why the call that waits does so; empty when none does."""
        self._client, self._loop = client, asyncio.get_running_loop()
        self._shm_dir, self._spill_dir = Path(membership.shm_dir), Path(membership.spill_dir)
        self._api = client.bind(StoreApi, timeout_s=CALL_S)
        self._calls = Calls(str(self.who), patience_s, self._waits)
        self._space_wait_s = space_wait_s
        self.writer = Writer(
            self._shm_dir, self.who, slab_bytes=min(SLAB_BYTES, capacity_bytes // 2), capacity_bytes=capacity_bytes
        )
        self.reader = Reader(self._shm_dir, self._spill_dir)
        self._unread: list[int] = []
        self._telling: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def connect(cls, folder: Path, name: str, *, capacity_bytes: int, **settings: Any) -> StoreClient:
        """Join the queue of a folder as `name`.

        Raises:
            Refused: no broker serves it, or it is on another node.
            Unreachable: the broker does not answer.
        """
        place = find(folder)
        if place.node != node_name():
            raise Refused(
                f"keyed store {folder}",
                why="its broker is on another node",
                hint="the store is for one node's processes",
            )
        greeting = rpc.Client(place.addresses[0], rpc.make_hello(RUN_ID, Incarnation(name, 0)))
        try:
            membership = await greeting.bind(QueueApi, timeout_s=CALL_S).join(name, place.node, os.getpid(), "")
        finally:
            await greeting.close()
        client = rpc.Client(place.addresses[0], rpc.make_hello(RUN_ID, membership.who))
        return cls(client, membership, capacity_bytes=capacity_bytes, **settings)

    async def close(self) -> None:
        """Leave. What was put stays; arrays that were read stay good while this process lives."""
        self._closed = True
        if self._telling is not None:
            self._telling.cancel()
            await asyncio.gather(self._telling, return_exceptions=True)
        await self._client.close()
        self.reader.close()

    def _waits(self, reason: str) -> None:
        self.waiting_on = reason

    # --- put

    async def configure(self, config: StoreConfig) -> StoreConfig:
        """See StoreApi.store_configure."""
        return await self._calls.call(lambda seq: self._api.store_configure(seq, config))

    async def config(self) -> StoreConfig | None:
        """See StoreApi.store_config."""
        return await self._api.store_config()

    async def put(
        self,
        rows: Rows,
        columns: Mapping[str, Any] | None = None,
        *,
        new: int = 0,
        tags: Sequence[Tags] = (),
        replace_tags: bool = False,
    ) -> Stored:
        """Put columns (see Writer.put_columns) and tags on rows; see StoreApi.store_put.

        Raises:
            Refused: a value cannot be put, or rows and columns do not fit together.
            OutOfSpace: this process's shared memory, or the queue, stayed full for space_wait_s; nothing was put.
        """
        return await self._finished(self._put(rows, columns, new, list(tags), replace_tags))

    async def _put(
        self, rows: Rows, columns: Mapping[str, Any] | None, new: int, tags: list[Tags], replace_tags: bool
    ) -> Stored:
        deadline = self._loop.time() + self._space_wait_s
        placed = await self._place(columns, deadline) if columns else None
        block, blobs = (placed.block, placed.blobs) if placed is not None else (None, [])
        try:
            stored = await self._admitted(
                lambda seq, slice_s: self._api.store_put(seq, rows, new, block, blobs, tags, replace_tags, slice_s),
                deadline,
            )
        except (Refused, OutOfSpace):
            # Only after such an answer is it sure that nobody reads the extents.
            self._free(placed.extents() if placed is not None else [])
            raise
        self._free(stored.freed)
        return stored

    async def _admitted(self, send: Callable[[int, float], Awaitable[Stored]], deadline: float) -> Stored:
        while True:
            slice_s = min(max(deadline - self._loop.time(), 0.0), ROOM_SLICE_S)
            stored = await self._calls.call(lambda seq, slice_s=slice_s: send(seq, slice_s))  # type: ignore[misc]
            self._waits(stored.waiting_on)
            if not stored.waiting_on:
                return stored
            if self._loop.time() >= deadline:
                self._waits("")
                raise OutOfSpace(f"put to the keyed store by {self.who}", why=stored.waiting_on)

    async def _place(self, columns: Mapping[str, Any], deadline: float) -> Placed:
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in columns.values())
        if nbytes >= THREAD_BYTES and self._unread:
            # Memory that comes free by it may be the memory for this put.
            await self._tell(self._taken_unread())
        while True:
            try:
                if nbytes < THREAD_BYTES:
                    return self.writer.put_columns(columns)
                return await asyncio.to_thread(self.writer.put_columns, columns)
            except OutOfSpace as error:
                if self._loop.time() >= deadline:
                    raise
                self._waits(str(error))
            await self._tell(self._taken_unread())
            await asyncio.sleep(SPACE_POLL_S)
            self._waits("")

    def _free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.writer.free(extent)

    # --- get

    async def find(self, rows: Rows) -> Found:
        """See StoreApi.store_find."""
        return await self._api.store_find(rows)

    async def get(self, rows: Rows, fields: list[str] | None = None) -> Reading:
        """Where the fields of the rows lie. Close it when what is needed was made of it."""
        return await self._finished(self._get(rows, fields))

    async def _finished(self, work: Coroutine[Any, Any, T]) -> T:
        """The work is done also when its caller gives up, so that no memory is forgotten."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop)
            raise

    async def _get(self, rows: Rows, fields: list[str] | None) -> Reading:
        fetched = await self._calls.call(lambda seq: self._api.store_get(seq, rows, fields))
        try:
            return Reading(
                fetched, self.reader, self._shm_dir, self._spill_dir, lambda: self._no_longer_read(fetched.pin)
            )
        except BaseException:
            self._no_longer_read(fetched.pin)
            raise

    def _no_longer_read(self, pin: int) -> None:
        """May be called by the garbage collector, in any thread."""
        if not pin or self._closed or self._loop.is_closed():
            return
        self._unread.append(pin)
        self._loop.call_soon_threadsafe(self._tell_soon)

    def _tell_soon(self) -> None:
        if self._telling is None and not self._closed:
            self._telling = self._loop.create_task(self._tell_later())
            self._telling.add_done_callback(self._told)

    async def _tell_later(self) -> None:
        while self._unread:
            await asyncio.sleep(UNPIN_AFTER_S)
            await self._tell(self._taken_unread())

    def _taken_unread(self) -> list[int]:
        taken, self._unread = self._unread, []
        return taken

    async def _tell(self, pins: list[int]) -> None:
        try:
            self._free(await self._calls.call(lambda seq: self._api.store_unpin(seq, pins)))
        except RelaxError:
            self._unread += pins
            raise

    def _told(self, task: asyncio.Task[None]) -> None:
        self._telling = None
        # Who cannot be reached is told by the next call; pins end with the process.
        if not task.cancelled() and task.exception() is None and self._unread:
            self._tell_soon()

    # --- the rest

    async def clear(self, rows: Rows) -> None:
        """See StoreApi.store_clear."""
        if self._unread:
            await self._tell(self._taken_unread())
        self._free(await self._calls.call(lambda seq: self._api.store_clear(seq, rows)))

    async def list_keys(self, partition: str | None) -> dict[str, dict[str, Tags]]:
        """See StoreApi.store_list."""
        return await self._api.store_list(partition)

    async def partitions(self) -> list[str]:
        """See StoreApi.store_partitions."""
        return await self._api.store_partitions()

    async def sample(
        self,
        partition: str,
        task: str,
        fields: Sequence[str],
        batch: int,
        *,
        rank: int | None = None,
        batch_index: int | None = None,
        wait_s: float = 0.0,
    ) -> Found:
        """See StoreApi.store_sample."""
        names, deadline = list(fields), self._loop.time() + wait_s
        while True:
            slice_s = min(max(deadline - self._loop.time(), 0.0), SLICE_S)
            found = await self._calls.call(
                lambda seq, slice_s=slice_s: self._api.store_sample(  # type: ignore[misc]
                    seq, partition, task, names, batch, rank, batch_index, slice_s
                )
            )
            if not found.waiting_on or self._loop.time() >= deadline:
                self._waits("")
                return found
            self._waits(found.waiting_on)

    async def consumed(self, partition: str, task: str) -> tuple[list[int], list[bool]] | None:
        """Indexes of a partition's rows, and whether the task has consumed each; None if there is no such partition."""
        status = await self._api.store_consumed(partition, task)
        return (status.indexes, [flags[0] for flags in status.flags]) if status.known else None

    async def produced(self, partition: str, fields: Sequence[str]) -> tuple[list[int], list[list[bool]]] | None:
        """Indexes of a partition's rows, and which of the fields each has; None if one of these is not known."""
        status = await self._api.store_produced(partition, list(fields))
        return (status.indexes, status.flags) if status.known else None

    async def reset(self, partition: str, task: str | None) -> bool:
        """See StoreApi.store_reset."""
        return await self._calls.call(lambda seq: self._api.store_reset(seq, partition, task))


def _drop(task: asyncio.Task[Any]) -> None:
    """Nobody waits for the answer any more."""
    if not task.cancelled() and task.exception() is None and isinstance(answer := task.result(), Reading):
        answer.close()
