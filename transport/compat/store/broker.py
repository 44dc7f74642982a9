"""The store's broker: the ledger behind its interface, with journal, waiting calls and slab files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from relax_rt.transport.base.calls import WaitingCalls
from relax_rt.transport.base.journal import Journal
from relax_rt.transport.base.liveness import ProcessWatch, node_name
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.compat.store.api import (
    MAX_ROWS,
    FetchedRows,
    FoundRows,
    RowNames,
    RowStatus,
    StoreConfig,
    StoredRows,
    StoreMembership,
    Tags,
)
from relax_rt.transport.compat.store.ledger import (
    ROOM,
    ROWS,
    BlocksSpilled,
    CallerGone,
    CallerJoined,
    ClearRows,
    ConfigureStore,
    GetRows,
    PutRows,
    Reply,
    ResetTask,
    SampleRows,
    StoreCall,
    StoreEntry,
    StoreLedger,
    StoreLimits,
    StoreOpened,
    UnpinRows,
)
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.memory.spill import SpillFiles, dead_slabs
from relax_rt.transport.rpc import rpc
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

MAX_WAIT_S = 60.0
FSYNC_EVERY_S = 1.0
_SPILL_RETRY_S = 5.0
_UNMET_KEPT = 1024
_OTHER_VERSION = "was it written by another version of relax-rt?"

T = TypeVar("T")
W = TypeVar("W", FoundRows, StoredRows)


def _rpc_caller() -> Incarnation:
    return rpc.caller().who


class StoreBroker:
    """Implements StoreApi. Every call that changes the store is in the journal before it is answered.

    Args:
        folder: of the journal.
        shm_dir: where slabs lie; the broker unlinks those of processes that have ended.
        spill_dir: where spilled blocks go.
        memory: name of the shared memory; another one than in the journal means that all rows are lost.
        identify: who calls; the default asks the RPC layer.
    """

    def __init__(
        self,
        folder: Path,
        shm_dir: Path,
        spill_dir: Path,
        *,
        memory: str,
        limits: StoreLimits,
        identify: Callable[[], Incarnation] = _rpc_caller,
    ) -> None:
        self._shm_dir, self._spill_dir = shm_dir, spill_dir
        self._memory, self._limits, self._identify = memory, limits, identify
        self._journal = Journal(folder)
        self._encoder = msgspec.msgpack.Encoder()
        self._ledger = StoreLedger()
        self._disk = SpillFiles(shm_dir, spill_dir, 0)
        self._watch = ProcessWatch(self._process_ended)
        self._waits = WaitingCalls(time.monotonic)
        self._unmet: dict[tuple[Incarnation, int], FoundRows | StoredRows] = {}
        self._full = asyncio.Event()
        self._sweep_wanted = True
        self._failed: asyncio.Future[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    # --- life

    async def open(self) -> None:
        """Recover the ledger and begin to keep journal and memory. Call it once, before any other method.

        Raises:
            Corrupt: the journal is damaged in a way that lost acknowledged events, or of another version.
        """
        self._failed = asyncio.get_running_loop().create_future()
        recovered = await asyncio.to_thread(self._journal.recover)
        try:
            self._ledger = StoreLedger(recovered.snapshot)
        except msgspec.DecodeError as error:
            raise Corrupt(f"journal snapshot {recovered.n}", why=str(error), hint=_OTHER_VERSION) from error
        decode = msgspec.msgpack.Decoder(StoreEntry).decode
        for n, payload in recovered.records:
            try:
                same = self._ledger.apply(decode(payload)).changed and self._ledger.state.n == n
            except (Refused, msgspec.DecodeError) as error:
                raise Corrupt(f"journal record {n}", why=str(error), hint=_OTHER_VERSION) from error
            if not same:
                raise Corrupt(f"journal record {n}", why="its replay changes nothing", hint=_OTHER_VERSION)
        self._apply(StoreOpened(self._memory, self._limits))
        # A broker that spills has journaled something before, so no two brokers of a folder use the same number.
        self._disk = SpillFiles(self._shm_dir, self._spill_dir, self._ledger.state.n)
        for known in list(self._ledger.state.callers.values()):
            self._watch.add(known.who, known.pid, known.started)
        self._tasks = [asyncio.create_task(work()) for work in (self._keep_disk, self._keep_room)]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def run(self) -> None:
        """Run until the broker fails.

        Raises:
            Exception: what stopped it (OutOfSpace: the journal could not be written). A restart recovers all that was
                acknowledged.
        """
        assert self._failed is not None, "open() first"
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stop, and force the journal to disk."""
        self._watch.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()
        await asyncio.to_thread(self._journal.close)

    def _fail(self, error: BaseException) -> None:
        """The state in memory is ahead of the journal: nothing may be answered any more."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)
            # Mark it as retrieved, also where nobody awaits run().
            self._failed.exception()
        self._waits.touch_all()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _check_alive(self) -> None:
        if self._failed is not None and self._failed.done():
            # Not the caller's fault: it asks the next incarnation again.
            error = self._failed.exception() if not self._failed.cancelled() else None
            raise Unreachable("the store's broker", why=f"it failed ({error}) and is to be started again")

    # --- events

    def _apply(
        self,
        event: StoreOpened | CallerJoined | CallerGone | BlocksSpilled | StoreCall,
        seq: int | None = None,
    ) -> Reply:
        """Apply an event, journal it, wake waiting calls; then the reply may be sent. seq: of a call; who asks is."""
        self._check_alive()
        who = self._identify() if seq is not None else None
        entry = StoreEntry(self._ledger.state.n + 1, event, who, seq or 0)
        sound = False
        try:
            outcome = self._ledger.apply(entry)
            if outcome.changed:
                self._journal.append(entry.n, self._encoder.encode(entry))
            sound = True
        except Refused:
            sound = True
            raise
        except OutOfSpace as error:
            self._fail(error)
            raise Unreachable("the store's broker", why=str(error)) from error
        finally:
            if not sound:
                self._fail(RuntimeError(f"the store's ledger broke down on {entry}"))
        if outcome.touched:
            self._waits.touch(outcome.touched)
        if self._ledger.state.blocks.payload_bytes > self._limits.high_water * self._limits.capacity_bytes:
            self._full.set()
        return outcome.reply

    def _call(self, event: StoreCall, seq: int, kind: type[T]) -> T:
        reply = self._apply(event, seq)
        assert isinstance(reply, kind)
        return reply

    async def _wait_for(self, event: StoreCall, topic: str, seq: int, wait_s: float, kind: type[W]) -> W:
        """Apply an event until its reply waits on nothing or wait_s is over; then reply with the reason."""
        who = self._identify()
        key = (who, seq)
        # In this order a wait of NaN seconds is none.
        deadline = time.monotonic() + min(max(0.0, wait_s), MAX_WAIT_S)
        token = self._waits.enter(who.slot, topic)
        try:
            while True:
                # A copy of this call, sent over a connection that was lost, may have been answered "nothing yet": then
                # its caller has gone on, and this copy must not take rows that nobody would read.
                reply = self._unmet.get(key) or self._call(event, seq, kind)
                if not isinstance(reply, kind):
                    raise Refused(f"call {seq}", why="another call had this number", hint="number changing calls anew")
                left = deadline - time.monotonic()
                if not reply.waiting_on or left <= 0 or key in self._unmet:
                    break
                await self._waits.wait(token, reply.waiting_on, left)
        finally:
            self._waits.leave(token)
        if reply.waiting_on:
            self._unmet[key] = reply
            while len(self._unmet) > _UNMET_KEPT:
                del self._unmet[next(iter(self._unmet))]
        return reply

    def _process_ended(self, who: Incarnation, _reason: str) -> None:
        """A watched process is dead. May come after the broker's own failure, when nothing can be journaled."""
        if self._failed is not None and not self._failed.done():
            self._apply(CallerGone(who))
            self._sweep_wanted = True

    # --- StoreApi says what each of these does

    async def join(self, name: str, node: str, pid: int) -> StoreMembership:
        if node != node_name():
            raise Refused(
                f"joining the store as '{name}'",
                why="its broker is on another node",
                hint="the store is for one node's processes",
            )
        started = start_time(pid)
        if not started:
            raise Refused(f"joining as '{name}'", why=f"there is no process {pid} on this node")
        who = Incarnation(name, self._ledger.state.next_epoch)
        self._apply(CallerJoined(who, pid, started))
        self._watch.add(who, pid, started)
        return StoreMembership(who, str(self._shm_dir), str(self._spill_dir))

    async def configure(self, seq: int, config: StoreConfig) -> StoreConfig:
        return self._call(ConfigureStore(config), seq, StoreConfig)

    async def config(self) -> StoreConfig | None:
        return self._ledger.state.config

    async def put(
        self,
        seq: int,
        rows: RowNames,
        new: int,
        block: BlockRef | None,
        blobs: list[BlobRef],
        tags: list[Tags],
        replace_tags: bool,
        wait_s: float,
    ) -> StoredRows:
        if max(new, len(rows.keys), len(rows.indexes)) > MAX_ROWS:
            raise Refused(f"put of over {MAX_ROWS} rows", why="that is the limit of one call", hint="put fewer at once")
        return await self._wait_for(PutRows(rows, new, block, blobs, tags, replace_tags), ROOM, seq, wait_s, StoredRows)

    async def find(self, rows: RowNames) -> FoundRows:
        return self._ledger.rows.find(rows)

    async def get(self, seq: int, rows: RowNames, fields: list[str] | None) -> FetchedRows:
        return self._call(GetRows(rows, fields), seq, FetchedRows)

    async def unpin(self, seq: int, pins: list[int]) -> list[Extent]:
        return list(self._call(UnpinRows(pins), seq, list))

    async def clear(self, seq: int, rows: RowNames) -> list[Extent]:
        return list(self._call(ClearRows(rows), seq, list))

    async def list_keys(self, partition: str | None) -> dict[str, dict[str, Tags]]:
        return self._ledger.rows.list_keys(partition)

    async def partitions(self) -> list[str]:
        return list(self._ledger.state.partitions)

    async def sample(
        self,
        seq: int,
        partition: str,
        task: str,
        fields: list[str],
        batch: int,
        rank: int | None,
        batch_index: int | None,
        wait_s: float,
    ) -> FoundRows:
        event = SampleRows(partition, task, fields, batch, rank, batch_index)
        return await self._wait_for(event, ROWS, seq, wait_s, FoundRows)

    async def consumed(self, partition: str, task: str) -> RowStatus:
        return self._ledger.rows.consumed(partition, task)

    async def produced(self, partition: str, fields: list[str]) -> RowStatus:
        return self._ledger.rows.produced(partition, fields)

    async def reset(self, seq: int, partition: str, task: str | None) -> bool:
        return self._call(ResetTask(partition, task), seq, bool)

    def waiting(self) -> dict[str, str]:
        """What each caller waits for now."""
        return self._waits.reasons()

    # --- disk and memory

    async def _keep_disk(self) -> None:
        """Force the journal to disk, make snapshots, and unlink slabs that no one needs."""
        while True:
            await asyncio.sleep(FSYNC_EVERY_S)
            self._check_alive()
            await asyncio.to_thread(self._journal.sync)
            if self._journal.wants_snapshot:
                await asyncio.to_thread(self._journal.rotate(self._ledger.snapshot()))
            if self._sweep_wanted:
                state = self._ledger.state
                # Again until the last spilled block is gone, and its file.
                self._sweep_wanted = state.blocks.spilled_bytes > 0
                names = await asyncio.to_thread(self._disk.names)
                dead = dead_slabs(names, state.blocks.live, self._has_ended)
                await asyncio.to_thread(self._disk.unlink, dead)

    def _has_ended(self, owner: str) -> bool:
        return owner not in self._ledger.state.callers

    async def _keep_room(self) -> None:
        """Spill the oldest blocks while shared memory is filled past the high-water mark."""
        unreadable: set[int] = set()
        while True:
            await self._full.wait()
            self._full.clear()
            while moves := self._ledger.to_spill(unreadable):
                try:
                    copied, failed = await asyncio.to_thread(self._disk.spill, moves)
                except OutOfSpace:
                    # Puts wait meanwhile; they say that memory is full.
                    await asyncio.sleep(_SPILL_RETRY_S)
                    continue
                self._apply(BlocksSpilled(copied))
                self._disk.written()
                self._sweep_wanted = True
                unreadable = {id_ for id_ in unreadable if id_ in self._ledger.state.blocks.blocks} | failed.keys()
