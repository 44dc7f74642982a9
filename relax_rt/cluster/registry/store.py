"""The registry's durable state: SQLite with a write-ahead log, written in a thread of its own."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from relax_rt.cluster.registry.core import Counters, Dropped, Entry, Issued, RegistryState, Write
from relax_rt.config.version import VERSION
from relax_rt.interfaces.registry import IncarnationEnd, Member
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import Corrupt, RelaxError
from relax_rt.transport.rpc.identity import Incarnation

T = TypeVar("T")

SCHEMA = 2

_TABLES = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS member (
  slot TEXT PRIMARY KEY, epoch INTEGER NOT NULL, pid INTEGER NOT NULL, address TEXT NOT NULL, state TEXT NOT NULL,
  policy_version INTEGER NOT NULL, detail TEXT NOT NULL, ttl_s REAL NOT NULL, node TEXT NOT NULL, remote TEXT NOT NULL,
  before_epoch INTEGER, before_reason TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS issued (version INTEGER PRIMARY KEY, slot TEXT NOT NULL, epoch INTEGER NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS version (
  version INTEGER PRIMARY KEY, parent INTEGER NOT NULL, step INTEGER NOT NULL, digest TEXT NOT NULL,
  changed INTEGER NOT NULL) STRICT;
"""

_COLUMNS = "slot, epoch, pid, address, state, policy_version, detail, ttl_s, node, remote, before_epoch, before_reason"
_PUT_MEMBER = f"INSERT OR REPLACE INTO member ({_COLUMNS}) VALUES ({', '.join('?' * 12)})"
_SET = "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value"


class Store:
    """One registry's file. Only one process has it open for writing.

    A write is on disk, not only handed to the operating system: epochs and versions are also named in checkpoints
    and in the queue's journal, and must not be given out twice after the host went down.

    Args:
        path: the SQLite file; made if it is not there.
        run_id: of this run. Members of another one (an earlier `up` of the same run directory) are ended.
    """

    def __init__(self, path: Path, run_id: str) -> None:
        self.path = path
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="registry-store")
        self._db: sqlite3.Connection | None = None
        self._run_id = run_id
        self._pending: list[Write] = []
        self._written = 0
        self._queued = 0
        self._flushing: asyncio.Task[None] | None = None
        self._failure: RelaxError | None = None
        self._closed = False

    async def open(self) -> RegistryState:
        """Open the file and read it.

        Raises:
            Corrupt: it is no registry, or damaged.
            RelaxError: it cannot be opened, or was written by a newer version.
        """
        try:
            return await self._run(self._open)
        except RelaxError:
            await self.close()
            raise

    async def close(self) -> None:
        """Write what is pending and close the file. May be called again."""
        if self._closed:
            return
        try:
            await self.durable()
        finally:
            self._closed = True
            await self._run(self._close)
            self._thread.shutdown()

    def put(self, writes: Sequence[Write]) -> None:
        """Queue writes; `durable` waits for them."""
        self._pending += writes
        self._queued += len(writes)

    async def durable(self) -> None:
        """Wait until everything put so far is on disk. Writes of several callers share one transaction. Raises
        RelaxError: they could not be written; nothing may be acknowledged any more."""
        target = self._queued
        while self._written < target:
            if self._failure is not None:
                raise self._failure
            if self._flushing is None or self._flushing.done():
                self._flushing = asyncio.create_task(self._flush())
            # A cancelled caller must not cancel the transaction of the others.
            await asyncio.shield(self._flushing)

    async def _flush(self) -> None:
        batch, self._pending = self._pending, []
        try:
            await self._run(self._write, batch)
        except RelaxError as error:
            # From here on the state in memory is ahead of the file: only a restart makes them agree.
            self._failure = error
            raise
        except Exception as error:
            why = f"{type(error).__name__}: {error}"
            self._failure = RelaxError(f"registry file {self.path} cannot be written", why=why)
            raise self._failure from error
        self._written += len(batch)

    async def _run(self, function: Callable[..., T], *args: Any) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except sqlite3.OperationalError as error:
            hint = "free space, or check the permissions of the run directory"
            raise RelaxError(f"registry file {self.path} cannot be used", why=str(error), hint=hint) from error
        except sqlite3.DatabaseError as error:
            hint = "a fresh run directory starts a fresh registry"
            raise Corrupt(f"registry file {self.path}", why=str(error), hint=hint) from error

    def _open(self) -> RegistryState:
        db = sqlite3.connect(self.path, timeout=5.0, isolation_level=None, check_same_thread=False)
        self._db = db
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.executescript(_TABLES)
        db.execute("BEGIN IMMEDIATE")
        meta = dict(db.execute("SELECT key, value FROM meta").fetchall())
        if int(meta.get("schema", SCHEMA)) != SCHEMA:
            raise RelaxError(
                f"registry file {self.path} was written by another version of relax-rt, which {VERSION} cannot read",
                why=f"its schema is {meta['schema']}, this version reads {SCHEMA}",
                hint="use that version for it, or move the run directory away and start the run anew",
            )
        generation = int(meta.get("generation", 0)) + 1
        if meta.get("run_id", self._run_id) != self._run_id:
            db.execute("UPDATE member SET state = 'gone', detail = 'from an earlier start of the run', ttl_s = 0")
        for key, value in (("schema", SCHEMA), ("generation", generation), ("run_id", self._run_id)):
            db.execute(_SET, (key, str(value)))
        stored = RegistryState(
            generation=generation,
            counters=Counters(int(meta.get("epoch", 0)), int(meta.get("version", 0))),
            entries=[_entry(row) for row in db.execute(f"SELECT {_COLUMNS} FROM member ORDER BY slot")],
            issued=[
                Issued(row[0], Incarnation(row[1], row[2]))
                for row in db.execute("SELECT version, slot, epoch FROM issued")
            ],
            versions=[
                VersionRecord(v, parent, step, digest, bool(changed))
                for v, parent, step, digest, changed in db.execute(
                    "SELECT version, parent, step, digest, changed FROM version ORDER BY version"
                )
            ],
        )
        db.execute("COMMIT")
        return stored

    def _close(self) -> None:
        if self._db is not None:
            self._db.close()
            self._db = None

    def _write(self, batch: list[Write]) -> None:
        db = self._db
        if db is None:
            raise sqlite3.OperationalError("the registry file is closed")
        db.execute("BEGIN IMMEDIATE")
        try:
            for write in batch:
                _apply(db, write)
            db.execute("COMMIT")
        except BaseException:
            # A failed COMMIT may have ended the transaction itself.
            if db.in_transaction:
                db.execute("ROLLBACK")
            raise


def _entry(row: Sequence[Any]) -> Entry:
    slot, epoch, pid, address, state, policy_version, detail, ttl_s, node, remote, before_epoch, before_reason = row
    member = Member(
        Incarnation(slot, epoch),
        pid,
        address,
        state,
        policy_version,
        detail=detail,
        before=None if before_epoch is None else IncarnationEnd(before_epoch, before_reason),
        node=node,
        remote=remote,
    )
    return Entry(member, ttl_s)


def _apply(db: sqlite3.Connection, write: Write) -> None:
    match write:
        case Entry(member=m, ttl_s=ttl_s):
            before = (None, "") if m.before is None else (m.before.epoch, m.before.reason)
            row = (m.who.slot, m.who.epoch, m.pid, m.address, m.state, m.policy_version, m.detail, ttl_s)
            db.execute(_PUT_MEMBER, (*row, m.node, m.remote, *before))
        case Counters(epoch=epoch, version=version):
            db.executemany(_SET, [("epoch", str(epoch)), ("version", str(version))])
        case Issued(version=version, who=who):
            db.execute("INSERT OR REPLACE INTO issued VALUES (?, ?, ?)", (version, who.slot, who.epoch))
        case VersionRecord() as v:
            db.execute(
                "INSERT OR REPLACE INTO version VALUES (?, ?, ?, ?, ?)",
                (v.version, v.parent, v.step, v.digest, int(v.changed)),
            )
            # A number at or below the committed one can never be committed any more.
            db.execute("DELETE FROM issued WHERE version <= ?", (v.version,))
        case Dropped(slot=slot):
            db.execute("DELETE FROM member WHERE slot = ?", (slot,))
