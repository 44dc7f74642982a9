"""The broker: the ledger behind its interface, with journal, clock, waiting callers and slab files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relax_rt.transport import rpc
from relax_rt.transport.errors import Corrupt, OutOfSpace, Refused, Unreachable
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.journal import Journal
from relax_rt.transport.ledger import Entry, Ledger, LedgerPolicy, QueueLimits, admission
from relax_rt.transport.ledger import account as ledger_account
from relax_rt.transport.ledger import events as ev
from relax_rt.transport.ledger.extents import owner_of
from relax_rt.transport.ledger.machine import Answer
from relax_rt.transport.queue.api import Admission, Batch, Failure, Freed, Put, QueueStats
from relax_rt.transport.versions import VersionRecord

MAX_WAITERS = 4096
MAX_WAIT_S = 60.0
_EMPTY_KEPT = 1024
_OTHER_VERSION = "was it written by another version of relax-rt?"

T = TypeVar("T", Admission, Batch)
Notify = Callable[[str, dict[str, Any]], None]


def _ignore(_kind: str, _fields: dict[str, Any]) -> None:
    """For brokers whose events nobody wants."""


def _rpc_caller() -> Incarnation:
    return rpc.caller().who


class Broker:
    """Implements QueueApi. Every call that changes the ledger is in the journal before it is answered.

    Args:
        folder: of the journal.
        shm_dir: where the slabs lie; the broker unlinks those of dead incarnations.
        run_id: of this shared memory; another one than in the journal means that all payloads are lost.
        policy, limits: see LedgerPolicy and QueueLimits.
        identify: who calls; the default asks the RPC layer.
        clock: seconds, monotonic within this process.
        notify: gets the ledger's notices (kind, fields) for the event log, with their sequence number `n`.
        fsync_every_s: how often the journal is forced to disk.
        segment_bytes: size of the journal from which on a snapshot is made.
    """

    def __init__(
        self,
        folder: Path,
        shm_dir: Path,
        *,
        run_id: str,
        policy: LedgerPolicy,
        limits: QueueLimits,
        identify: Callable[[], Incarnation] = _rpc_caller,
        clock: Callable[[], float] = time.monotonic,
        notify: Notify = _ignore,
        fsync_every_s: float = 1.0,
        segment_bytes: int = 16 << 20,
    ) -> None:
        self._shm_dir, self._run_id, self._policy, self._limits = shm_dir, run_id, policy, limits
        self._identify, self._clock, self._notify = identify, clock, notify
        self._fsync_every_s = fsync_every_s
        self._journal = Journal(folder, segment_bytes=segment_bytes)
        self._encoder = msgspec.msgpack.Encoder()
        self._ledger = Ledger()
        self._changed = asyncio.Event()
        self._rearm = asyncio.Event()
        self._waiting: dict[int, tuple[str, str]] = {}
        self._waits = 0
        self._empty: dict[tuple[Incarnation, int], Admission | Batch] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._failed: asyncio.Future[None] | None = None
        self._sweep_wanted = True
        self.syncs = 0
        """Rounds of the disk task: the proof that loop and disk both get on."""

    # --- life

    async def open(self) -> None:
        """Recover the ledger and begin to keep time. Call it once, before any other method.

        Raises:
            Corrupt: the journal is damaged in a way that lost acknowledged events.
        """
        self._failed = asyncio.get_running_loop().create_future()
        recovered = await asyncio.to_thread(self._journal.recover)
        self._ledger = Ledger(recovered.snapshot)
        decode = msgspec.msgpack.Decoder(Entry).decode
        for n, payload in recovered.records:
            try:
                same = self._ledger.apply(decode(payload)).changed and self._ledger.n == n
            except (Refused, msgspec.DecodeError) as error:
                raise Corrupt(f"journal record {n}", why=str(error), hint=_OTHER_VERSION) from error
            if not same:
                raise Corrupt(f"journal record {n}", why="its replay changes nothing", hint=_OTHER_VERSION)
        if recovered.torn_bytes:
            self._notify("queue_journal_torn", {"cut_bytes": recovered.torn_bytes, "n": self._ledger.n})
        self._apply(ev.Configure(self._policy, self._limits))
        self._apply(ev.Open(self._run_id))
        self._ledger.restart_deadlines(self._clock())
        self._notify("queue_recovered", {"n": self._ledger.n, "records": len(recovered.records)})
        self._tasks = [asyncio.create_task(self._keep_time()), asyncio.create_task(self._keep_disk())]
        for task in self._tasks:
            task.add_done_callback(self._task_ended)

    async def run(self) -> None:
        """Until the broker cannot go on.

        Raises:
            Exception: what stopped it (OutOfSpace: the journal could not be written). A restart recovers all that was
            acknowledged.
        """
        assert self._failed is not None, "open() first"
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """Stop keeping time, force the journal to disk."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._failed is not None and not self._failed.done():
            self._failed.cancel()
        await asyncio.to_thread(self._journal.close)

    def _fail(self, error: BaseException) -> None:
        """What is in memory is ahead of the journal: nothing may be answered any more."""
        assert self._failed is not None
        if not self._failed.done():
            self._failed.set_exception(error)
            # Also read by those who never await run().
            self._failed.exception()
        self._wake()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    def _check_alive(self) -> None:
        if self._failed is not None and self._failed.done():
            # Not the caller's fault: it asks the next incarnation again.
            raise Unreachable("the queue's broker", why="it failed and restarts from its journal")

    # --- events

    def _apply(self, event: ev.Event, who: Incarnation | None = None, seq: int = 0) -> Answer:
        """Apply, journal, wake whoever waits; then the answer may be given."""
        self._check_alive()
        if who is not None and not isinstance(event, ev.Join) and not self._ledger.knows(who):
            self._apply(ev.Join(), who)
        entry = Entry(self._ledger.n + 1, self._clock(), event, who, seq)
        failure: BaseException | None = RuntimeError(f"the ledger broke down on {entry}")
        try:
            outcome = self._ledger.apply(entry)
            if outcome.changed:
                self._journal.append(entry.n, self._encoder.encode(entry))
            failure = None
        except Refused:
            failure = None
            raise
        except OutOfSpace as error:
            failure = error
            raise Unreachable("the queue's broker", why=str(error)) from error
        finally:
            if failure is not None:
                self._fail(failure)
        if outcome.changed:
            for kind, fields in outcome.notices:
                self._notify(kind, {**fields, "n": entry.n})
            self._wake()
        return outcome.answer

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._rearm.set()

    async def _wait_for(self, event: ev.Admit | ev.Take, who: Incarnation, seq: int, wait_s: float, kind: type[T]) -> T:
        """Try until there is something to answer with, at most wait_s; then answer with the reason."""
        key = (who, seq)
        deadline = self._clock() + min(max(wait_s, 0.0), MAX_WAIT_S)
        self._waits += 1
        token = self._waits
        if len(self._waiting) >= MAX_WAITERS:
            raise OutOfSpace(f"waiting calls of the queue, {who}", why=f"{MAX_WAITERS} wait already")
        try:
            while True:
                # A copy of this call, sent over a connection that was lost, may have been answered meanwhile.
                answer = self._empty.get(key) or self._apply(event, who, seq)
                assert isinstance(answer, kind)
                left = deadline - self._clock()
                if not answer.waiting_on or left <= 0 or key in self._empty:
                    break
                self._waiting[token] = (who.slot, answer.waiting_on)
                with suppress(TimeoutError):
                    async with asyncio.timeout(left):
                        await self._changed.wait()
        finally:
            self._waiting.pop(token, None)
        if answer.waiting_on:
            self._empty[key] = answer
            while len(self._empty) > _EMPTY_KEPT:
                del self._empty[next(iter(self._empty))]
        return answer

    # --- QueueApi

    async def admit(self, seq: int, engine_version: int, groups: int, wait_s: float) -> Admission:
        """See QueueApi."""
        return await self._wait_for(ev.Admit(engine_version, groups), self._identify(), seq, wait_s, Admission)

    async def put(self, seq: int, puts: list[Put]) -> list[Freed]:
        """See QueueApi."""
        answer = self._apply(ev.PutColumns(puts), self._identify(), seq)
        assert isinstance(answer, list)
        return answer

    async def give_back(self, seq: int, groups: list[int], reason: str) -> None:
        """See QueueApi."""
        self._apply(ev.GiveBack(groups, reason), self._identify(), seq)

    async def renew(self, groups: list[int], leases: list[int]) -> list[int]:
        """See QueueApi. Not journaled: after a restart all leases run at full length."""
        self._check_alive()
        who = self._identify()
        self._ledger.knows(who)
        return self._ledger.renew(who, [*groups, *leases], self._clock())

    async def take(self, seq: int, task: str, samples: int, groups: int, wait_s: float) -> Batch:
        """See QueueApi."""
        return await self._wait_for(ev.Take(task, samples, groups), self._identify(), seq, wait_s, Batch)

    async def complete(self, seq: int, task: str, lease: int, puts: list[Put], failures: list[Failure]) -> list[Freed]:
        """See QueueApi."""
        answer = self._apply(ev.Complete(task, lease, puts, failures), self._identify(), seq)
        assert isinstance(answer, list)
        return answer

    async def abandon(self, seq: int, lease: int, reason: str) -> None:
        """See QueueApi."""
        self._apply(ev.Abandon(lease, reason), self._identify(), seq)

    async def trained(self, seq: int, lease: int, step: int, weights: VersionRecord) -> None:
        """See QueueApi."""
        self._apply(ev.Trained(lease, step, weights), self._identify(), seq)

    async def committed(self, seq: int, step: int, checkpoint: str) -> None:
        """See QueueApi."""
        self._apply(ev.Committed(step, checkpoint), self._identify(), seq)
        self._sweep_wanted = True

    async def rollback(self, seq: int, step: int, weights: VersionRecord) -> None:
        """See QueueApi."""
        self._apply(ev.Rollback(step, weights), self._identify(), seq)

    async def gone(self, seq: int, who: Incarnation, reason: str) -> None:
        """See QueueApi."""
        self._apply(ev.Gone(who, reason), self._identify(), seq)
        self._sweep_wanted = True

    async def stats(self) -> QueueStats:
        """See QueueApi."""
        core, state = self._ledger.core, self._ledger.state
        announced = state.trainer_version
        return QueueStats(
            by_state=ledger_account.by_state(core),
            outstanding=admission.outstanding(core),
            bound=admission.bound(core, announced) if announced is not None else 0.0,
            trainer_version=announced or 0,
            step=state.step,
            payload_bytes=state.extents.payload_bytes,
            journal_bytes=self._journal.nbytes,
            prompts_issued=state.prompts.issued,
            prompts_returned=state.prompts.returned,
            refused_stale=state.ended.get("refused(stale)", 0),
            waiting=dict(self._waiting.values()),
        )

    async def account(self) -> dict[str, int]:
        """See QueueApi."""
        return self._ledger.account()

    def summary(self) -> str:
        """What the queue does, in a line for `ps`."""
        state = self._ledger.state
        held = sum(group.size for group in state.groups.values())
        return f"step {state.step}, {held} samples on the way, {len(self._waiting)} callers wait"

    # --- time and disk

    async def _keep_time(self) -> None:
        """Lapse what was not renewed in time, and wake takers when a wait for stragglers ends."""
        woken_for: float | None = None
        while True:
            self._rearm.clear()
            now, lapse_at, straggler_at = self._clock(), self._ledger.next_lapse(), self._ledger.straggler_deadline()
            if lapse_at is not None and now - lapse_at > max(1.0, self._limits.lease_s / 4):
                # This process was paused: renewals that wait in its sockets come before any lapse.
                self._ledger.restart_deadlines(now)
                continue
            if (lapse := self._ledger.due(now)) is not None:
                self._apply(lapse)
                continue
            if straggler_at is not None and straggler_at <= now and woken_for != straggler_at:
                woken_for = straggler_at
                self._wake()
                continue
            times = [at for at in (lapse_at, straggler_at) if at is not None and at > now]
            with suppress(TimeoutError):
                async with asyncio.timeout(min(times) - now if times else None):
                    await self._rearm.wait()

    async def _keep_disk(self) -> None:
        """Force the journal to disk, make snapshots, and unlink slabs that no one needs."""
        while True:
            await asyncio.sleep(self._fsync_every_s)
            self._check_alive()
            await asyncio.to_thread(self._journal.sync)
            if self._journal.wants_snapshot:
                await asyncio.to_thread(self._journal.rotate(self._ledger.snapshot()))
            if self._sweep_wanted:
                self._sweep_wanted = False
                names = await asyncio.to_thread(self._slab_names)
                live = self._ledger.state.extents.live
                await asyncio.to_thread(self._unlink, [name for name in names if self._is_dead(name, live)])
            self.syncs += 1

    def _slab_names(self) -> list[str]:
        return [path.name for path in self._shm_dir.glob("*.slab")]

    def _is_dead(self, slab: str, live: Container[str]) -> bool:
        """Whether the slab's owner is fenced and none of its extents is live."""
        slot, _, epoch = owner_of(slab).rpartition("-")
        lowest = {name.replace("/", "-"): low for name, low in self._ledger.state.callers.lowest.items()}
        return slab not in live and slot in lowest and epoch.isdigit() and int(epoch) < lowest[slot]

    def _unlink(self, names: list[str]) -> None:
        for name in names:
            (self._shm_dir / name).unlink(missing_ok=True)
