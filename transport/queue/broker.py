"""The broker: the ledger behind its interface, with journal, clock, waiting callers and slab files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from relax_rt.transport.base.broker import JournaledBroker, rpc_caller
from relax_rt.transport.base.journal import SEGMENT_BYTES
from relax_rt.transport.base.liveness import PauseDetector
from relax_rt.transport.base.process_stat import start_time
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.refs import Extent, owner_key
from relax_rt.transport.memory.spill import SpillFiles, dead_slabs
from relax_rt.transport.queue.ledger import admission, failures
from relax_rt.transport.queue.ledger import events as ev
from relax_rt.transport.queue.ledger.admission import load_partials
from relax_rt.transport.queue.ledger.core import ROOM
from relax_rt.transport.queue.ledger.events import JournalEntry
from relax_rt.transport.queue.ledger.machine import Answer, EventOutcome, Ledger, load_samplers
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    BlockPut,
    Failure,
    Freed,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    LeaseRequest,
    Membership,
    PartialChunk,
    ProgressReport,
    QueueStats,
    SampleKey,
    SavedPartials,
    StepReply,
)
from relax_rt.transport.queue.ledger.policy import LedgerPolicy, QueueLimits
from relax_rt.transport.queue.ledger.state import ClientProcess
from relax_rt.transport.queue.samplers.builtin import load_sampler
from relax_rt.transport.queue.statistics import States, broker_statistics
from relax_rt.transport.rpc.errors import Corrupt, OutOfSpace, Refused, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation
from relax_rt.transport.rpc.interface import eager

_SPILL_RETRY_S = 5.0
FAR_SILENT_S = 600.0
"""Seconds of silence after which a process on another node, which cannot be watched, counts as dead."""

Notify = Callable[[str, dict[str, Any]], None]


def _ignore(_kind: str, _fields: dict[str, Any]) -> None:
    """The default notify: drops the notice."""


class Broker(JournaledBroker[Ledger]):
    """Implements QueueApi. Every call that changes the ledger is in the journal before it is answered.

    Args:
        folder: of the journal.
        shm_dir: where the slabs lie; the broker unlinks those of dead incarnations.
        run_id: of this shared memory; another one than in the journal means that all payloads are lost.
        policy, limits: see LedgerPolicy and QueueLimits.
        spill_dir: where spilled blocks go; default: ``spill`` beside the journal.
        node: name of this node, for callers that join; empty: all callers are on it.
        payloads: address of this node's payload server, for readers on other nodes.
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
        spill_dir: Path | None = None,
        node: str = "",
        payloads: str = "",
        identify: Callable[[], Incarnation] = rpc_caller,
        clock: Callable[[], float] = time.monotonic,
        notify: Notify = _ignore,
        fsync_every_s: float = 1.0,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        super().__init__(
            "the queue's broker", folder, Ledger(), identify=identify, clock=clock, segment_bytes=segment_bytes
        )
        self.shm_dir, self.spill_dir = shm_dir, spill_dir or folder / "spill"
        self._run_id, self._policy, self._limits = run_id, policy, limits
        self._node, self._payloads = node, payloads
        self._notify = notify
        self._fsync_every_s = fsync_every_s
        self._disk = SpillFiles(shm_dir, self.spill_dir, 0)
        self._states = States()
        self._rearm = asyncio.Event()
        self._tight = asyncio.Event()
        self._sweep_wanted = True
        self._straggler_at: float | None = None
        self._unspillable: set[int] = set()
        self._short: dict[str, int] = {}
        self._far: dict[Incarnation, float] = {}
        self.syncs = 0
        """Rounds of the disk task: the proof that loop and disk both get on."""

    # --- life

    async def open(self) -> None:
        """Recover the ledger and begin to keep time. Call it once, before any other method.

        Raises:
            Corrupt: the journal is damaged in a way that lost acknowledged events.
        """
        recovered = await self._recover(lambda snapshot: Ledger(snapshot, load_sampler), JournalEntry)
        if recovered.torn_bytes:
            self._notify("queue_journal_torn", {"cut_bytes": recovered.torn_bytes, "n": self._ledger.n})
        # Fail on a sampler that cannot be loaded before anything changes.
        load_samplers(self._policy, load_sampler)
        self._apply(ev.ConfigureQueue(self._policy, self._limits))
        self._apply(ev.OpenRun(self._run_id, self._node, self._payloads))
        # Every broker journals something before it spills, so no two of them have the same number.
        self._disk = SpillFiles(self.shm_dir, self.spill_dir, self._ledger.n)
        self._ledger.restart_deadlines(self._clock())
        self._notify("queue_recovered", {"n": self._ledger.n, "records": len(recovered.records)})
        for process in list(self._ledger.state.callers.processes.values()):
            if self._ledger.concerned(process.who):
                self._notice_end_of(process)
        self._start(self._keep_time, self._keep_disk, self._keep_room)
        self._after_change(frozenset())

    def _fail(self, error: BaseException) -> None:
        super()._fail(error)
        self._rearm.set()

    # --- events

    def _apply(self, event: ev.Event, who: Incarnation | None = None, seq: int = 0) -> Answer:
        """Apply and journal an event, and wake whoever waits for it; then the answer may be given."""
        self._check_alive()
        if who is not None and not isinstance(event, ev.JoinQueue) and not self._ledger.knows(who):
            if self._node:
                # Every caller has joined; the ledger forgets one only when shared memory was recreated.
                raise StaleEpoch(
                    f"call of {who}",
                    why="the queue's memory began anew since it joined, and what it puts would lie in the old one",
                    hint="connect again",
                )
            self._apply(ev.JoinQueue(), who)
        entry = JournalEntry(self._ledger.n + 1, self._clock(), event, who, seq)
        outcome: EventOutcome = self._commit(entry)
        if outcome.changed:
            for kind, fields in outcome.notices:
                self._notify(kind, {**fields, "n": entry.n})
            self._after_change(outcome.touched)
        return outcome.answer

    def _after_change(self, touched: frozenset[str]) -> None:
        if touched:
            self._waits.touch(touched)
        state = self._ledger.state
        if state.policy is not None and self._straggler_at != (at := self._ledger.straggler_deadline()):
            self._straggler_at = at
            self._rearm.set()
        if state.blocks.payload_bytes > state.limits.high_water * state.limits.capacity_bytes:
            self._tight.set()

    def _to_journal(self, entry: JournalEntry, outcome: EventOutcome) -> JournalEntry:
        assert outcome.event is not None
        return JournalEntry(entry.n, entry.at, outcome.event, entry.who, entry.seq)

    # --- QueueApi says what each of these does

    async def join(self, name: str, node: str, pid: int, payloads: str) -> Membership:
        here = node == self._node
        started = start_time(pid) if here and pid else 0
        if here and pid and not started:
            raise Refused(f"joining as '{name}'", why=f"there is no process {pid} on this node")
        callers = self._ledger.state.callers
        # Skip the epochs that a supervisor issued for this name.
        who = Incarnation(name, max(self._ledger.state.next_epoch, callers.lowest.get(name, 0) + 1))
        # A caller on this node puts into this node's slabs, which its own payload server gives out.
        self._apply(ev.JoinQueue(node, "" if here else payloads, pid if here else 0, started, issued=True), who)
        self._notice_end_of(callers.processes[owner_key(who)])
        self._sweep_wanted = True
        shm_dir, spill_dir = str(self.shm_dir), str(self.spill_dir)
        fields, lease_s, max_bytes = self._policy.fields, self._limits.lease_s, self._limits.max_sample_bytes
        return Membership(who, self._run_id, shm_dir, spill_dir, self._node, lease_s, fields, max_bytes)

    async def register(self, node: str, payloads: str) -> None:
        if not self._node:
            self._apply(ev.JoinQueue(node, payloads, issued=True), self._identify())

    async def payload_servers(self, owners: list[str]) -> dict[str, str]:
        return self._ledger.state.callers.remote(self._identify(), owners)

    def _notice_end_of(self, process: ClientProcess) -> None:
        """Watch a process that joined for its end. Under a supervisor, which reports ends, silence is none."""
        if process.node == self._node:
            self._watch.add(process.who, process.pid, process.started)
        elif self._node:
            self._far[process.who] = self._clock()

    def _process_ended(self, who: Incarnation, reason: str) -> None:
        """A watched process is dead. May come after the broker's own failure, when there is nothing left to say."""
        if not self._alive:
            return
        if self._ledger.concerned(who):
            self._apply(ev.ProcessExited(who, reason))
        self._sweep_wanted = True

    @eager
    async def put_groups(self, seq: int, puts: list[BlockPut], groups: list[int], wait_s: float) -> GroupsPut:
        return await self._wait_for(ev.PutGroups(puts, groups), ROOM, seq, wait_s, GroupsPut)

    @eager
    async def admit(self, seq: int, engine_version: int, groups: int, wait_s: float) -> Admission:
        return await self._wait_for(ev.RequestTickets(engine_version, groups), ROOM, seq, wait_s, Admission)

    @eager
    async def put_samples(self, seq: int, puts: list[BlockPut], short_bytes: int = 0) -> list[Extent]:
        if short_bytes and self._limits.spill_bytes:
            self._short[owner_key(self._identify())] = short_bytes
            self._tight.set()
        return self._call(ev.PutSamples(puts), seq, Freed).extents

    @eager
    async def save_partials(self, seq: int, chunks: list[PartialChunk]) -> SavedPartials:
        return self._call(ev.SavePartials(chunks), seq, SavedPartials)

    @eager
    async def load_partials(self, keys: list[SampleKey]) -> list[PartialChunk]:
        self._check_alive()
        who = self._identify()
        self._ledger.knows(who)
        return load_partials(self._ledger.core, who, keys)

    @eager
    async def release_groups(
        self,
        seq: int,
        groups: list[int],
        reason: str,
        failed: bool = False,
        losses: int = 0,
        late: bool = False,
        item: str = "",
        about: str = "",
    ) -> None:
        self._apply(ev.ReleaseGroups(groups, reason, failed, losses, late, item, about), self._identify(), seq)

    async def skip_groups(self, seq: int, groups: list[int]) -> None:
        self._apply(ev.SkipGroups(groups), self._identify(), seq)

    async def progress(self) -> ProgressReport:
        self._check_alive()
        return failures.report(self._ledger.core)

    def report_losses(self, older_s: float = 0.0) -> None:
        """Report the losses that were not reported and whose cause was last reported at least `older_s` seconds ago.

        The ledger itself reports a cause only when another sample is lost for it, so without this call the last losses
        are not reported.

        Raises:
            Unreachable: the broker failed.
        """
        self._apply(ev.ReportFailures(older_s))

    async def reinstate(self, items: list[str]) -> None:
        self._apply(ev.ReinstateItems(items))

    @eager
    async def renew(self, groups: list[int], leases: list[int]) -> list[int]:
        # Not journaled: after a restart all leases run at full length.
        self._check_alive()
        who = self._identify()
        self._ledger.knows(who)
        if who in self._far:
            self._far[who] = self._clock()
        return self._ledger.renew(who, [*groups, *leases], self._clock())

    @eager
    async def lease(self, seq: int, task: str, request: LeaseRequest, wait_s: float) -> LeaseGrant:
        return await self._wait_for(ev.RequestLease(task, request), task, seq, wait_s, LeaseGrant)

    @eager
    async def complete(
        self, seq: int, lease: int, puts: list[BlockPut], failures: list[Failure], pinned: bool
    ) -> list[Extent]:
        return self._call(ev.CompleteLease(lease, puts, failures, pinned), seq, Freed).extents

    @eager
    async def unpin(self, seq: int, leases: list[int]) -> list[Extent]:
        return self._call(ev.UnpinLeases(leases), seq, Freed).extents

    @eager
    async def release(self, seq: int, lease: int, reason: str, pinned: bool = False) -> None:
        self._apply(ev.ReleaseLease(lease, reason, pinned), self._identify(), seq)

    async def complete_step(
        self, seq: int, leases: list[int], step: int, weights: VersionRecord, skipped: bool, pinned: list[int]
    ) -> StepReply:
        return self._call(ev.CompleteStep(leases, step, weights, skipped, pinned), seq, StepReply)

    async def filter_groups(self, seq: int, lease: int, groups: list[int], reason: str, pinned: bool) -> None:
        self._apply(ev.FilterGroups(lease, groups, reason, pinned), self._identify(), seq)

    async def request_surplus(self, seq: int, groups: int) -> None:
        self._apply(ev.RequestSurplus(groups), self._identify(), seq)

    async def assign_items(self, seq: int, items: dict[int, int]) -> ItemsAssigned:
        return self._call(ev.AssignItems(items), seq, ItemsAssigned)

    async def flush(self) -> None:
        self._check_alive()
        try:
            await self._force_journal()
        except (OSError, Corrupt) as error:
            self._fail(error)
            raise Unreachable("the queue's broker", why=str(error)) from error

    async def commit(self, seq: int, step: int, checkpoint: str) -> None:
        self._apply(ev.Commit(step, checkpoint), self._identify(), seq)
        self._sweep_wanted = True

    async def rollback(self, seq: int, step: int, weights: VersionRecord) -> None:
        self._apply(ev.Rollback(step, weights), self._identify(), seq)

    async def process_exited(self, seq: int, who: Incarnation, reason: str) -> None:
        self._apply(ev.ProcessExited(who, reason), self._identify(), seq)
        self._watch.remove(who)
        self._far.pop(who, None)
        self._sweep_wanted = True

    async def stats(self) -> QueueStats:
        core, state = self._ledger.core, self._ledger.state
        announced, bound = state.trainer_version, 0.0
        if announced is not None and self._policy.group_size:
            bound = admission.admission_bound(core, announced)
        return QueueStats(
            by_state=self._states.of(self._ledger),
            outstanding=admission.outstanding(core),
            bound=bound,
            trainer_version=announced or 0,
            step=state.step,
            payload_bytes=state.blocks.payload_bytes,
            journal_bytes=self._journal.nbytes,
            prompts_issued=state.prompts.issued,
            prompts_returned=state.prompts.returned,
            refused_stale=state.ended.get("refused(stale)", 0),
            waiting=self._waits.reasons(),
            committed=state.committed,
        )

    async def statistics(self) -> dict[str, Any]:
        return broker_statistics(self._ledger, self._journal, self._waits, self._states)

    async def account(self) -> dict[str, int]:
        return self._ledger.account()

    @property
    def held(self) -> int:
        """Samples that are not finished."""
        return self._ledger.core.held

    def summary(self) -> str:
        """Describe the state of the queue in one line, for `ps`."""
        core = self._ledger.core
        failed = core.state.progress.failed_groups
        lost = f", {failed} groups in a row failed" if failed else ""
        return f"step {core.state.step}, {core.held} samples on the way, {len(self._waits)} callers wait{lost}"

    # --- time and disk

    async def _keep_time(self) -> None:
        """Lapse what was not renewed in time, and wake the trainer when its wait for stragglers ends."""
        lease_s = self._limits.lease_s
        tick_s = min(max(lease_s / 8, 0.02), 1.0)
        woken_for: float | None = None
        pauses = PauseDetector(self._clock(), tick_s)
        while True:
            self._rearm.clear()
            now, straggler_at = self._clock(), self._ledger.straggler_deadline()
            verdict = pauses.check(now)
            if verdict == "restart":
                self._ledger.restart_deadlines(now)
                self._far = dict.fromkeys(self._far, now)
            elif verdict == "expire" and self._judge(now):
                continue
            if straggler_at is not None and straggler_at <= now and woken_for != straggler_at:
                woken_for = straggler_at
                self._waits.touch([self._policy.step_task])
                continue
            # New leases run longer than a tick, so that only a wait for stragglers can shorten it.
            late_s = straggler_at - now if straggler_at is not None and straggler_at > now else tick_s
            with suppress(TimeoutError):
                async with asyncio.timeout(min(tick_s, late_s)):
                    await self._rearm.wait()

    def _judge(self, now: float) -> bool:
        """Lapse tickets and leases that were not renewed, and end silent processes. True if one lapsed."""
        for who in [who for who, at in self._far.items() if now - at > FAR_SILENT_S]:
            del self._far[who]
            self._process_ended(who, f"it was not heard of for {FAR_SILENT_S:.0f} s")
        lapse = self._ledger.due(now)
        if lapse is not None:
            self._apply(lapse)
        return lapse is not None

    async def _keep_disk(self) -> None:
        """Force the journal to disk, make snapshots, and unlink slabs that no one needs."""
        while True:
            await asyncio.sleep(self._fsync_every_s)
            self._check_alive()
            await self._force_journal(snapshot=True)
            if self._sweep_wanted:
                # Again until the last spilled block is gone, and its file.
                self._sweep_wanted = self._ledger.state.blocks.spilled_bytes > 0
                names = await asyncio.to_thread(self._disk.names)
                state = self._ledger.state
                dead = dead_slabs(names, state.blocks.live, state.callers.ended)
                await asyncio.to_thread(self._disk.unlink, dead)
            self.syncs += 1

    async def _keep_room(self) -> None:
        """Spill cold blocks while shared memory is filled past the high-water mark."""
        while True:
            await self._tight.wait()
            self._tight.clear()
            while moves := self._ledger.to_spill(self._unspillable, self._short):
                # Who is still short of memory says so again.
                self._short.clear()
                try:
                    copied, unreadable = await asyncio.to_thread(self._disk.spill, moves)
                except OutOfSpace as error:
                    # Producers wait meanwhile; their calls say that memory is full.
                    self._notify("queue_spill_failed", {"error": str(error), "n": self._ledger.n})
                    await asyncio.sleep(_SPILL_RETRY_S)
                    continue
                self._apply(ev.MoveBlocks(copied))
                self._disk.written()
                self._sweep_wanted = True
                for id_, why in unreadable.items():
                    self._notify("queue_block_unreadable", {"block": id_, "why": why, "n": self._ledger.n})
                self._unspillable = {id_ for id_ in self._unspillable if id_ in self._ledger.state.blocks.blocks}
                self._unspillable |= unreadable.keys()
