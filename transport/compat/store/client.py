"""The store for processes on the broker's node: its calls, and the memory that goes with them."""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from relax_rt.transport.base.calls import NumberedCalls
from relax_rt.transport.base.folder import RUN_ID, find
from relax_rt.transport.base.liveness import node_name
from relax_rt.transport.compat.store.api import (
    FetchedRows,
    FoundRows,
    RowNames,
    StoreApi,
    StoreConfig,
    StoredRows,
    StoreMembership,
    Tags,
)
from relax_rt.transport.memory.arena import ArenaReader, ArenaWriter, PlacedBlock
from relax_rt.transport.memory.blocks import Block
from relax_rt.transport.memory.refs import BlockRef, Extent
from relax_rt.transport.memory.slabs import path_of
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

CALL_S = 30.0
SLICE_S = 1.0
"""Long waits are made of calls of this length: a longer call is reported as a silent broker, and memory of a dead
process is freed without a reply."""
SPACE_POLL_S = 0.02
UNPIN_AFTER_S = 0.002
"""Unpins that come within this time go out together."""
THREAD_BYTES = 8 << 20
"""A copy of more than this leaves the event loop."""
SLAB_BYTES = 64 << 20

PRIVATE_MAP_FROM_BYTES = 64 << 10
"""Less than this is copied, as a private mapping costs more."""

T = TypeVar("T")


class StoreClient:
    """A process's part in the store. Make it with `connect`; every method is for its event loop.

    Args:
        client: connected to the broker under the name and epoch of `joined`.
        capacity_bytes: shared memory that this process may put into.
        patience_s: how long a broker that cannot be reached is asked again.
        space_wait_s: how long a put waits for memory to be freed, its own and that of the queue.
    """

    def __init__(
        self,
        client: rpc.RpcClient,
        joined: StoreMembership,
        *,
        capacity_bytes: int,
        patience_s: float = 60.0,
        space_wait_s: float = 60.0,
    ) -> None:
        self.who = joined.who
        self.waiting_on = ""
        """Why the call that waits does so; empty when none does."""
        self._client, self._loop = client, asyncio.get_running_loop()
        self._shm_dir, self._spill_dir = Path(joined.shm_dir), Path(joined.spill_dir)
        self.api = client.bind(StoreApi, timeout_s=CALL_S)
        self._calls = NumberedCalls(str(self.who), patience_s, self._set_waiting)
        self._space_wait_s = space_wait_s
        self.writer = ArenaWriter(
            self._shm_dir, self.who, slab_bytes=min(SLAB_BYTES, capacity_bytes // 2), capacity_bytes=capacity_bytes
        )
        self.reader = ArenaReader(self._shm_dir, self._spill_dir)
        self._unpinned: list[int] = []
        self._unpinning: asyncio.Task[None] | None = None
        self._closed = False

    @classmethod
    async def connect(cls, folder: Path, name: str, *, capacity_bytes: int, **settings: Any) -> StoreClient:
        """Join the store of a folder as `name`.

        Raises:
            Refused: no broker serves it, or it is on another node.
            Unreachable: the broker does not answer.
        """
        address = find(folder).addresses[0]
        greeting = rpc.RpcClient(address, rpc.make_hello(RUN_ID, Incarnation(name, 0)))
        try:
            joined = await greeting.bind(StoreApi, timeout_s=CALL_S).join(name, node_name(), os.getpid())
        finally:
            await greeting.close()
        client = rpc.RpcClient(address, rpc.make_hello(RUN_ID, joined.who))
        return cls(client, joined, capacity_bytes=capacity_bytes, **settings)

    async def close(self) -> None:
        """Leave. What was put stays; arrays that were read stay valid while this process lives."""
        self._closed = True
        if self._unpinning is not None:
            self._unpinning.cancel()
            await asyncio.gather(self._unpinning, return_exceptions=True)
        await self._client.close()
        self.reader.close()

    def _set_waiting(self, reason: str) -> None:
        self.waiting_on = reason

    # --- put

    async def configure(self, config: StoreConfig) -> StoreConfig:
        """Set the configuration if there is none; returns the one in force."""
        return await self._calls.call(lambda seq: self.api.configure(seq, config))

    async def put(
        self,
        rows: RowNames,
        columns: Mapping[str, Any] | None = None,
        *,
        new: int = 0,
        tags: Sequence[Tags] = (),
        replace_tags: bool = False,
    ) -> StoredRows:
        """Put columns (see ArenaWriter.put_columns) and tags on rows; see StoreApi.put.

        Raises:
            Refused: a value cannot be put, or rows and columns do not fit together.
            OutOfSpace: this process's shared memory, or the queue, stayed full for space_wait_s; nothing was put.
        """
        return await self._shielded(self._put(rows, columns, new, list(tags), replace_tags))

    async def _put(
        self, rows: RowNames, columns: Mapping[str, Any] | None, new: int, tags: list[Tags], replace_tags: bool
    ) -> StoredRows:
        deadline = self._loop.time() + self._space_wait_s
        placed = await self._place(columns, deadline) if columns else None
        block, blobs = (placed.block, placed.blobs) if placed is not None else (None, [])
        try:
            while True:
                slice_s = min(max(deadline - self._loop.time(), 0.0), SLICE_S)
                stored = await self._calls.call(
                    lambda seq, slice_s=slice_s: self.api.put(  # type: ignore[misc]
                        seq, rows, new, block, blobs, tags, replace_tags, slice_s
                    )
                )
                self._set_waiting(stored.waiting_on)
                if not stored.waiting_on:
                    break
                if self._loop.time() >= deadline:
                    self._set_waiting("")
                    raise OutOfSpace(f"put to the store by {self.who}", why=stored.waiting_on)
        except (Refused, OutOfSpace):
            # Only such an answer makes sure that the broker did not enter the extents.
            self._free(placed.extents() if placed is not None else [])
            raise
        self._free(stored.freed)
        return stored

    async def _place(self, columns: Mapping[str, Any], deadline: float) -> PlacedBlock:
        nbytes = sum(int(getattr(value, "nbytes", 0)) for value in columns.values())
        if nbytes >= THREAD_BYTES and self._unpinned:
            # It may free the memory for this put.
            await self._unpin(self._take_unpinned())
        while True:
            try:
                if nbytes < THREAD_BYTES:
                    return self.writer.put_columns(columns)
                return await asyncio.to_thread(self.writer.put_columns, columns)
            except OutOfSpace as error:
                if self._loop.time() >= deadline:
                    raise
                self._set_waiting(str(error))
            await self._unpin(self._take_unpinned())
            await asyncio.sleep(SPACE_POLL_S)
            self._set_waiting("")

    def _free(self, extents: Sequence[Extent]) -> None:
        for extent in extents:
            self.writer.free(extent)

    # --- get

    async def get(self, rows: RowNames, fields: list[str] | None = None) -> RowReading:
        """Where the fields of the rows lie. Close it when what is needed was made of it."""
        return await self._shielded(self._get(rows, fields))

    async def _shielded(self, work: Coroutine[Any, Any, T]) -> T:
        """Finish the work also when its caller is cancelled, so that no extent or pin leaks."""
        task = asyncio.ensure_future(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(_drop)
            raise

    async def _get(self, rows: RowNames, fields: list[str] | None) -> RowReading:
        fetched = await self._calls.call(lambda seq: self.api.get(seq, rows, fields))
        try:
            return RowReading(fetched, self.reader, self._shm_dir, self._spill_dir, lambda: self._release(fetched.pin))
        except BaseException:
            self._release(fetched.pin)
            raise

    def _release(self, pin: int) -> None:
        """May be called by the garbage collector, in any thread."""
        if not pin or self._closed or self._loop.is_closed():
            return
        self._unpinned.append(pin)
        self._loop.call_soon_threadsafe(self._unpin_soon)

    def _unpin_soon(self) -> None:
        if self._unpinning is None and not self._closed:
            self._unpinning = self._loop.create_task(self._unpin_later())
            self._unpinning.add_done_callback(self._unpin_ended)

    async def _unpin_later(self) -> None:
        while self._unpinned:
            await asyncio.sleep(UNPIN_AFTER_S)
            await self._unpin(self._take_unpinned())

    def _take_unpinned(self) -> list[int]:
        taken, self._unpinned = self._unpinned, []
        return taken

    async def _unpin(self, pins: list[int]) -> None:
        try:
            self._free(await self._calls.call(lambda seq: self.api.unpin(seq, pins)))
        except RelaxError:
            self._unpinned += pins
            raise

    def _unpin_ended(self, task: asyncio.Task[None]) -> None:
        self._unpinning = None
        # A broker that was out of reach gets the pins with the next call; they end with the process in any case.
        if not task.cancelled() and task.exception() is None and self._unpinned:
            self._unpin_soon()

    # --- the rest

    async def clear(self, rows: RowNames) -> None:
        """Remove rows; a whole partition if neither keys nor indexes are given."""
        if self._unpinned:
            await self._unpin(self._take_unpinned())
        self._free(await self._calls.call(lambda seq: self.api.clear(seq, rows)))

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
    ) -> FoundRows:
        """Rows for a task, chosen by the sampler and consumed by this call; waits for them at most wait_s."""
        names, deadline = list(fields), self._loop.time() + wait_s
        while True:
            found = await self._calls.wait(
                lambda seq, slice_s: self.api.sample(seq, partition, task, names, batch, rank, batch_index, slice_s),
                min(max(deadline - self._loop.time(), 0.0), SLICE_S),
            )
            if not found.waiting_on or self._loop.time() >= deadline:
                self._set_waiting("")
                return found
            self._set_waiting(found.waiting_on)

    async def consumed(self, partition: str, task: str) -> tuple[list[int], list[bool]] | None:
        """Indexes of a partition's rows, and whether the task has consumed each; None if there is no such partition."""
        status = await self.api.consumed(partition, task)
        return (status.indexes, [flags[0] for flags in status.flags]) if status.known else None

    async def produced(self, partition: str, fields: Sequence[str]) -> tuple[list[int], list[list[bool]]] | None:
        """Indexes of a partition's rows, and which of the fields each has; None if one of these is not known."""
        status = await self.api.produced(partition, list(fields))
        return (status.indexes, status.flags) if status.known else None

    async def reset(self, partition: str, task: str | None) -> bool:
        """Let a task (None: every task) consume the partition anew; False if there is no such partition."""
        return await self._calls.call(lambda seq: self.api.reset(seq, partition, task))


def _drop(task: asyncio.Task[Any]) -> None:
    """Close a Reading whose caller was cancelled."""
    if not task.cancelled() and task.exception() is None and isinstance(answer := task.result(), RowReading):
        answer.close()


class FieldRun(NamedTuple):
    """`rows` rows of a field, from row `first` of a block on.

    own: the block lies in private pages; else copy what is to be kept.
    """

    block: Block
    first: int
    rows: int
    own: bool


class RowReading:
    """The rows of a FetchedRows, until `close`. What is made of private pages stays valid after it.

    Args:
        fetched: the answer.
        reader: maps slabs.
        shm_dir, spill_dir: where they are.
        on_release: called once, from any thread, when nothing refers to the answer's memory any more.
    """

    def __init__(
        self, fetched: FetchedRows, reader: ArenaReader, shm_dir: Path, spill_dir: Path, on_release: Callable[[], None]
    ) -> None:
        self.fields, self.rows = fetched.fields, len(fetched.indexes)
        self._segments = fetched.segments
        self._dirs = (shm_dir, spill_dir)
        self._open = 1
        self._on_release = on_release
        blobs = {blob.digest: blob.extent for blob in fetched.blobs}
        alone = fetched.segments[0] if len(fetched.segments) == 1 else None
        self._blocks: list[tuple[Block, bool]] = []
        for ref in fetched.blocks:
            # Blobs would need pages of their own too; they are copied.
            own = (
                alone is not None
                and not blobs
                and ref.extent is not None
                and ref.extent.nbytes * alone.rows >= PRIVATE_MAP_FROM_BYTES * ref.rows
            )
            self._blocks.append((self._own_block(ref) if own else reader.block(ref, blobs), own))

    def _own_block(self, ref: BlockRef) -> Block:
        assert ref.extent is not None
        memory, skip = map_private(ref.extent, *self._dirs)
        self._open += 1
        weakref.finalize(memory, self._closed_one).atexit = False
        data = np.frombuffer(memory, np.uint8)[skip : skip + ref.extent.nbytes]
        block = Block(data, where=f"block {ref.extent.slab}+{ref.extent.offset}", read_only_mapping=True)
        if (block.rows, block.names) != (ref.rows, ref.fields):
            raise Corrupt(block.where, why=f"it has {block.rows} rows of {block.names}, not {ref.rows} of {ref.fields}")
        return block

    def pieces(self, field: str) -> Iterator[FieldRun]:
        """Where the rows of a field are, in order."""
        for segment in self._segments:
            for index, first in reversed(segment.parts):
                block, own = self._blocks[index]
                if field in block.names:
                    yield FieldRun(block, first, segment.rows, own)
                    break
            else:
                raise Corrupt(f"field '{field}'", why="no block of the answer has it")

    def close(self) -> None:
        """Release the blocks; only what was made of private pages stays valid."""
        for block, _ in self._blocks:
            block.drop_columns()
        self._blocks = []
        self._closed_one()

    def _closed_one(self) -> None:
        self._open -= 1
        if self._open == 0:
            self._on_release()


def map_private(extent: Extent, shm_dir: Path, spill_dir: Path) -> tuple[mmap.mmap, int]:
    """Map an extent's pages privately: a page that is written to becomes a copy.

    Returns:
        The mapping, and where in it the extent begins.

    Raises:
        Corrupt: there is no such memory.
    """
    skip = extent.offset % mmap.ALLOCATIONGRANULARITY
    where = f"extent {extent.slab}+{extent.offset}"
    try:
        path = path_of(extent.slab, shm_dir, spill_dir)
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if os.fstat(fd).st_size < extent.offset + extent.nbytes:
                raise Corrupt(where, why=f"its {extent.nbytes} bytes end beyond its file")
            return mmap.mmap(fd, skip + extent.nbytes, access=mmap.ACCESS_COPY, offset=extent.offset - skip), skip
        finally:
            os.close(fd)
    except (OSError, ValueError) as error:
        raise Corrupt(where, why=str(error)) from error
