"""The store's broker: the ledger behind its interface, with journal, waiting calls and slab files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

from relax_rt.transport.base.broker import JournaledBroker, rpc_caller
from relax_rt.transport.base.liveness import node_name
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
    StoreOutcome,
    UnpinRows,
)
from relax_rt.transport.memory.refs import BlobRef, BlockRef, Extent
from relax_rt.transport.memory.spill import SpillFiles, dead_slabs
from relax_rt.transport.rpc.errors import OutOfSpace, Refused
from relax_rt.transport.rpc.identity import Incarnation

FSYNC_EVERY_S = 1.0
_SPILL_RETRY_S = 5.0


class StoreBroker(JournaledBroker[StoreLedger]):
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
        identify: Callable[[], Incarnation] = rpc_caller,
    ) -> None:
        super().__init__("the store's broker", folder, StoreLedger(), identify=identify, clock=time.monotonic)
        self._shm_dir, self._spill_dir = shm_dir, spill_dir
        self._memory, self._limits = memory, limits
        self._disk = SpillFiles(shm_dir, spill_dir, 0)
        self._full = asyncio.Event()
        self._sweep_wanted = True

    async def open(self) -> None:
        """Recover the ledger and begin to keep journal and memory. Call it once, before any other method.

        Raises:
            Corrupt: the journal is damaged in a way that lost acknowledged events, or of another version.
        """
        await self._recover(StoreLedger, StoreEntry)
        self._apply(StoreOpened(self._memory, self._limits))
        # A broker that spills has journaled something before, so no two brokers of a folder use the same number.
        self._disk = SpillFiles(self._shm_dir, self._spill_dir, self._ledger.n)
        for known in list(self._ledger.state.callers.values()):
            self._watch.add(known.who, known.pid, known.started)
        self._start(self._keep_disk, self._keep_room)

    def _apply(
        self,
        event: StoreOpened | CallerJoined | CallerGone | BlocksSpilled | StoreCall,
        who: Incarnation | None = None,
        seq: int = 0,
    ) -> Reply:
        self._check_alive()
        outcome: StoreOutcome = self._commit(StoreEntry(self._ledger.n + 1, event, who, seq))
        if outcome.touched:
            self._waits.touch(outcome.touched)
        if self._ledger.state.blocks.payload_bytes > self._limits.high_water * self._limits.capacity_bytes:
            self._full.set()
        return outcome.reply

    def _process_ended(self, who: Incarnation, reason: str) -> None:
        if self._alive:
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
            await self._force_journal(snapshot=True)
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
