"""The TransferQueue's client: puts samples, leases them, completes or releases the leases, reports training steps.

Roles use `QueueClient` itself; processes outside a run come to it by `TransferQueue` (transfer_queue.py).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from relax_rt.transport.base.calls import CallStatistics, NumberedCalls
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.memory.arena import ArenaReader, ArenaReaderStatistics, ArenaWriter, ArenaWriterStatistics
from relax_rt.transport.memory.fields import check_row, parse_fields
from relax_rt.transport.memory.payload_fetcher import Fetcher
from relax_rt.transport.memory.refs import Extent, extents_in, owner_of
from relax_rt.transport.queue.api import QueueApi
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample, ViewTracker, extents_of
from relax_rt.transport.queue.ledger.messages import (
    WHY,
    Admission,
    BlockPut,
    Failure,
    GroupsPut,
    ItemsAssigned,
    LeaseGrant,
    LeaseRequest,
    PartialChunk,
    ProgressReport,
    SampleKey,
    StepReply,
    Ticket,
    VersionSpan,
)
from relax_rt.transport.queue.partials import CALL_CHUNKS, PartialCompletion, decode_partial, in_calls
from relax_rt.transport.queue.puts import PUT_WAIT_S, CopyThreads, GroupPuts, PayloadWriter, WaitReasons, puts_of
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, StaleEpoch, Unreachable
from relax_rt.transport.rpc.identity import Incarnation

__all__ = ["LeasedBatch", "LeasedSample", "NewSample", "QueueClient", "QueueClientStatistics"]

FIRST_SLICE_S, SLICE_S = 0.1, 1.0
"""Long waits are made of calls of this length, so that none holds the window of calls for long."""
HEARTBEAT_S = 60.0
"""An idle client renews nothing this often, so that a broker on another node knows that it lives."""

T = TypeVar("T")
P = TypeVar("P", Admission, GroupsPut, LeaseGrant)

_log = logging.getLogger("relax_rt.transport")


class NewSample(msgspec.Struct, frozen=True):
    """One new sample: all its columns, and the policy version of each token."""

    key: SampleKey
    columns: Mapping[str, Any]
    versions: list[VersionSpan]
    priority: float = 0.0


class QueueClientStatistics(msgspec.Struct, frozen=True):
    """Numbers of a client: its calls, the messages and samples of its puts, its own memory, what it maps."""

    calls: CallStatistics
    put_messages: int
    put_samples: int
    leases: int
    pinned_leases: int
    tickets: int
    waiting_on: str
    arena: ArenaWriterStatistics
    reader: ArenaReaderStatistics


class QueueClient:
    """One incarnation's client of the TransferQueue, for one event loop. Use it as an async context manager.

    Every changing call carries a sequence number and is sent again, with the same number, while the broker cannot be
    reached, for up to patience_s: the broker recognises it and answers as before (see NumberedCalls). A put or
    completion goes to its end in the background when its caller is cancelled; what a cancelled admit or lease was
    granted is released.

    Args:
        api: the broker's interface.
        who: this incarnation, as the broker sees it.
        shm_dir, spill_dir: the run's directory in shared memory, and where the broker spills to.
        slab_bytes, capacity_bytes: size of one slab, and of all slabs of this incarnation.
        patience_s: how long a broker that cannot be reached is asked again (it restarts within seconds).
        space_wait_s: how long a put waits for room in shared memory.
        fields: declared columns (see transport/memory/fields.py); values of another dtype or shape are refused here.
        length_field: the column whose length counts as a sample's tokens.
        max_sample_bytes: a sample with more payload is refused here, by the name of its largest field; 0: the broker's
            own check is enough.
        fetcher: gets payloads that lie on other nodes; closed by whoever made it.
        fetch_s: how long a lease waits for such a payload before it releases the samples and asks for others: their
            owner may be dead before the broker notices. 0: for the length of the lease, then it fails.
        on_lost: gets ids of groups that are no longer this incarnation's (lapsed or revoked): stop working on them.
        on_wait: gets the reason of a wait, and an empty string when none is left; for the role's progress. Waits for
            work (admit and lease) are not reported: whoever makes these knows whether there is other work.
    """

    def __init__(
        self,
        api: QueueApi,
        who: Incarnation,
        shm_dir: Path,
        *,
        spill_dir: Path | None = None,
        slab_bytes: int = 16 << 20,
        capacity_bytes: int = 256 << 20,
        patience_s: float = 120.0,
        space_wait_s: float = 60.0,
        fields: Mapping[str, str] | None = None,
        length_field: str = "",
        max_sample_bytes: int = 0,
        fetcher: Fetcher | None = None,
        fetch_s: float = 0.0,
        on_lost: Callable[[list[int]], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.api, self.who = api, who
        self._fetcher, self._fetch_s = fetcher, fetch_s
        self.arena = ArenaWriter(shm_dir, who, slab_bytes=slab_bytes, capacity_bytes=capacity_bytes)
        self.reader = ArenaReader(shm_dir, spill_dir, source=fetcher.memory if fetcher is not None else None)
        self.groups: dict[int, int] = {}
        """Tickets held: members not yet put, by group."""
        self.leases: set[int] = set()
        self.retired: set[str] = set()
        """Retired items, as of the newest admission."""
        self._retired_revision = 0
        self._fields = parse_fields(fields or {})
        self._on_lost = on_lost
        self._reasons, self._polls = WaitReasons(on_wait), WaitReasons()
        self._calls = NumberedCalls(str(who), patience_s, self._reasons.wait())
        self._threads = CopyThreads()
        self._payload = PayloadWriter(
            self.arena, self._collect, self._reasons, self._threads, space_wait_s, length_field, max_sample_bytes
        )
        self._group_puts = GroupPuts(self._put_groups, self._payload, self._fields, self._reasons)
        self._views = ViewTracker(self._views_gone)
        self._closing = False
        self._lease_s = 60.0
        self._renewal: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._held = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._renewal = asyncio.create_task(self._keep_leases())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop renewing; finish what is under way, and leave the queue.

        Leases still held lapse, or end with the process; so does memory over which arrays are still referred to.
        """
        self._closing = True
        await self._group_puts.batcher.close()
        if self._background:
            await asyncio.wait(self._background, timeout=SLICE_S)
        pending = [*self._background, *([self._renewal] if self._renewal else [])]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        if not self.groups and not self.leases and not len(self._views):
            # Nothing of this incarnation is needed: the broker forgets its replies and its empty slabs. One that is
            # away, or has a newer incarnation of this slot, learns of the process's end.
            with suppress(RelaxError, TimeoutError):
                async with asyncio.timeout(SLICE_S):
                    await self.api.process_exited(self._calls.next_number(), self.who, "it left")
        self._threads.close()
        self.arena.close()
        self.reader.close()

    async def warm(self, nbytes: int = 1) -> None:
        """Pre-fault slabs of `nbytes` in all, at least one, so that puts need not."""
        await asyncio.to_thread(self.arena.warm, nbytes)

    async def linger(self, wait_s: float) -> int:
        """Wait until others have read what lies in this memory; answers with the bytes that are left after wait_s."""
        return await self._payload.drained(wait_s)

    def statistics(self) -> QueueClientStatistics:
        """Numbers for people and metrics."""
        return QueueClientStatistics(
            self._calls.statistics(),
            self._group_puts.batcher.messages,
            self._group_puts.batcher.rows,
            len(self.leases),
            len(self._views),
            len(self.groups),
            self.waiting_on,
            self.arena.statistics(),
            self.reader.statistics(),
        )

    @property
    def waiting_on(self) -> str:
        """Why a call waits, of those that do the one that began last; empty when none does."""
        return self._reasons.current or self._polls.current

    # --- samples without a ticket

    async def put(
        self,
        samples: Sequence[Mapping[str, Any]] | Mapping[str, Any],
        *,
        group: bool = False,
        groups: list[int] | None = None,
        priorities: Sequence[float] | None = None,
        wait_s: float = PUT_WAIT_S,
    ) -> list[SampleKey]:
        """Put samples that no ticket was drawn for; answers with their keys when the broker has journaled them.

        Args:
            samples: a list of samples, each a mapping from field to value; or columns, a mapping from field to an array
                [samples, …] or a list with a value for each sample, which is faster for many samples of one kind.
            group: they make one group, which tasks may lease as a whole; default: each is a group of its own.
            groups: of a list of samples: sizes of the groups that consecutive ones make.
            priorities: one for each sample, for the priority sampler; higher goes first.
            wait_s: how long to wait for room.

        Raises:
            Refused: a value is not of its field's dtype or shape, a field is not declared, a sample is too large.
            OutOfSpace: the queue, or this incarnation's shared memory, stayed full for wait_s; nothing was put.
            Unreachable: the broker did not answer for patience_s.
        """
        if not isinstance(samples, Mapping | Sequence) or isinstance(samples, str | bytes):
            raise Refused(f"put of a {type(samples).__name__}", why="samples are a list of mappings, or columns")
        if isinstance(samples, Mapping):
            return await self._finish(self._group_puts.columns(samples, group, priorities, wait_s))
        sizes = [len(samples)] if group else groups
        return await self._group_puts.rows(samples, sizes, priorities, wait_s)

    async def _put_groups(self, puts: list[BlockPut], groups: list[int], wait_s: float) -> GroupsPut:
        return await self._call_waiting(lambda seq, slice_s: self.api.put_groups(seq, puts, groups, slice_s), wait_s)

    # --- groups of prompts

    async def admit(self, engine_version: int, groups: int, *, wait_s: float) -> Admission:
        """Ask for up to `groups` groups to generate; their tickets are renewed until all members are put.

        Raises:
            Unreachable: the broker did not answer for patience_s.
            StaleEpoch: a newer incarnation holds the slot.
        """
        return await self._finish(self._admit(engine_version, groups, wait_s), self._return_tickets)

    async def _admit(self, engine_version: int, groups: int, wait_s: float) -> Admission:
        answer = await self._poll(wait_s, lambda seq, slice_s: self.api.admit(seq, engine_version, groups, slice_s))
        for ticket in answer.tickets:
            self.groups[ticket.group] = len(ticket.wanted())
            self._hold(ticket.lease_s)
        if answer.retired != self._retired_revision:
            report = await self._call(lambda _: self.api.progress())
            self.retired, self._retired_revision = {one.item for one in report.retired}, report.revision
        return answer

    async def _return_tickets(self, answer: Admission) -> None:
        if answer.tickets:
            await self.release_groups([ticket.group for ticket in answer.tickets], "the request was cancelled")

    async def put_samples(self, samples: Sequence[NewSample]) -> None:
        """Put new samples of groups that this incarnation generates: one copy each, then one message.

        Raises:
            OutOfSpace: shared memory stayed full for space_wait_s.
            Refused: a sample is not one the caller may put (a group that was lost meanwhile is no error).
        """
        if samples:
            await self._finish(self._put_samples(samples))

    async def _put_samples(self, samples: Sequence[NewSample]) -> None:
        rows = [sample.columns for sample in samples]
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        puts = puts_of(
            await self._payload.rows(rows),
            [sample.key for sample in samples],
            versions=[list(sample.versions) for sample in samples],
            priorities=[sample.priority for sample in samples],
        )
        await self._send(puts, lambda seq: self.api.put_samples(seq, puts))
        for sample in samples:
            left = self.groups.get(sample.key.group, 0) - 1
            if left > 0:
                self.groups[sample.key.group] = left
            else:
                self.groups.pop(sample.key.group, None)

    async def release_groups(
        self,
        groups: Sequence[int],
        reason: str,
        *,
        failed: bool = False,
        losses: int = 0,
        late: bool = False,
        item: str = "",
        about: str = "",
    ) -> None:
        """Release unfinished groups; their missing members are admitted again.

        Args:
            failed: it could not be made, as when a task fails on a sample: the policy says what becomes of it, and a
                prompt that fails too often is retired.
            losses: how often it was begun here and lost, through no fault of its own. What is lost again and again,
                with nothing made of it in between, has failed.
            late, item, about: of a failure, see Failure.
        """
        given = self._forget_groups(groups)
        await self._finish(
            self._call(lambda seq: self.api.release_groups(seq, given, reason, failed, losses, late, item, about))
        )

    async def skip_groups(self, groups: Sequence[int]) -> None:
        """End these groups, whose items are in `retired`; other groups replace them."""
        given = self._forget_groups(groups)
        await self._finish(self._call(lambda seq: self.api.skip_groups(seq, given)))

    def _forget_groups(self, groups: Sequence[int]) -> list[int]:
        for group in groups:
            self.groups.pop(group, None)
        return list(groups)

    async def progress(self) -> ProgressReport:
        """Return the losses since the start of the run, and whether failed groups end it."""
        return await self._call(lambda _: self.api.progress())

    async def save_partials(self, chunks: Sequence[PartialChunk]) -> list[int]:
        """Journal tokens of unfinished samples; answers with the tokens now held of each (see SavedPartials).

        Raises:
            Refused: a chunk is malformed. Unreachable: the broker did not answer for patience_s.
        """
        held: list[int] = []
        for some in in_calls(chunks):
            answer = await self._call(lambda seq: self.api.save_partials(seq, some))  # noqa: B023
            held += answer.held
        return held

    async def load_partials(self, tickets: Iterable[Ticket]) -> dict[SampleKey, PartialCompletion]:
        """The partial completions of these tickets' members. A group that was lost meanwhile has none."""
        wanted = [SampleKey(ticket.group, member) for ticket in tickets for member in ticket.partials]
        found: dict[SampleKey, PartialCompletion] = {}
        while wanted:
            # Numbered like a changing call only to be sent again while the broker is away.
            chunks = await self._call(lambda _: self.api.load_partials(wanted[:CALL_CHUNKS]))  # noqa: B023
            if not chunks:
                wanted = wanted[CALL_CHUNKS:]
                continue
            found.update((chunk.key, decode_partial(chunk)) for chunk in chunks)
            # Members before the last one that are absent have no partial completion any more.
            wanted = wanted[wanted.index(chunks[-1].key) + 1 :]
        return found

    # --- consumers

    async def lease(
        self,
        task: str,
        *,
        samples: int = 0,
        groups: int = 0,
        tokens: int = 0,
        at_least: int = 0,
        wait_s: float = 0.0,
        fetch: bool = True,
    ) -> LeasedBatch:
        """Lease up to `samples` samples (of `tokens` tokens in all), or exactly `groups` whole groups, for a task.

        Answers as soon as there are some; with none after wait_s (the batch is false, and `waiting_on` says why).

        at_least: for training, fewer groups will do, as soon as so many are ready; `groups` is all that the step still
            lacks. Several such batches may be held: `complete_step` takes them all. The last one waits for stragglers.
        fetch: get the payload that lies on other nodes; else other processes read it, each its `part` of the batch.

        Raises:
            Unreachable: the broker did not answer for patience_s.
            Refused: there is no such task.
        """
        request = LeaseRequest(samples, groups, tokens, at_least=at_least)
        return await self._finish(self._lease(task, request, wait_s, fetch), self._return_batch)

    async def _lease(self, task: str, request: LeaseRequest, wait_s: float, fetch: bool) -> LeasedBatch:
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            grant = await self._poll(left_s, lambda seq, slice_s: self.api.lease(seq, task, request, slice_s))
            if not grant:
                if not grant.lease:
                    break
                lease = grant.lease
                await self._call(lambda seq: self.api.release(seq, lease, "it ended before its answer arrived"))  # noqa: B023
                continue
            self.leases.add(grant.lease)
            self._hold(grant.lease_s)
            try:
                if grant.remote and fetch:
                    await self._fetch(grant)
                break
            except (Unreachable, DeadlineExceeded) as error:
                if not self._fetch_s:
                    raise
                _log.warning("%s: samples released: %s", self.who, error)
                grant = LeaseGrant(0, [], waiting_on=str(error))
                if asyncio.get_running_loop().time() >= deadline:
                    break
        return LeasedBatch(task, grant, self.reader.block, self._dropped)

    async def _fetch(self, grant: LeaseGrant) -> None:
        """Get the payload of a lease that lies on other nodes.

        Raises:
            Refused: this client cannot fetch.
            Gone, Unreachable, DeadlineExceeded, Corrupt, OutOfSpace: see Fetcher; the lease was released.
        """
        if self._fetcher is None:
            raise Refused(f"payload on nodes {sorted(grant.remote)}", why="this client was made without a fetcher")
        wanted: dict[str, list[Extent]] = {}
        for extent in extents_of(grant):
            address = grant.remote.get(owner_of(extent.slab))
            if address is not None:
                wanted.setdefault(address, []).append(extent)
        wait, deadline_s = self._reasons.wait(), self._fetch_s or max(grant.lease_s, SLICE_S)
        wait(f"payload of lease {grant.lease} comes from {', '.join(wanted)}")
        try:
            await asyncio.gather(
                *(
                    self._fetcher.fetch(address, extents, lease=grant.lease, deadline_s=deadline_s)
                    for address, extents in wanted.items()
                )
            )
        except RelaxError as error:
            reason = str(error)
            self._fetcher.release(grant.lease)
            self.leases.discard(grant.lease)
            await self._call(lambda seq: self.api.release(seq, grant.lease, reason))
            raise
        finally:
            wait("")

    async def _return_batch(self, batch: LeasedBatch) -> None:
        if batch:
            await self.release(batch, "the request was cancelled")

    async def complete(
        self,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]] | None = None,
        failures: Sequence[Failure] = (),
        *,
        version: int = -1,
    ) -> None:
        """Finish a lease with new columns for its samples, and those that failed.

        If the lease lapsed meanwhile this has no effect on the samples, and is no error. Arrays taken from the batch
        stay good: their memory is not used again before the last of them is gone.

        version: the weights that the columns were computed with, for versioned fields.
        """
        await self._finish(self._complete(batch, columns or {}, failures, version))

    async def _complete(
        self,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]],
        failures: Sequence[Failure],
        version: int,
    ) -> None:
        keys, rows = list(columns), list(columns.values())
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        puts: list[BlockPut] = []
        if rows:
            puts = puts_of(await self._payload.rows(rows), keys, version=version)
        views = self._finish_batch(batch)
        lease, failed = batch.lease, list(failures)
        try:
            await self._send(puts, lambda seq: self.api.complete(seq, lease, puts, failed, bool(views)))
        except StaleEpoch:
            raise
        except Refused:
            # The lease is as it was: the caller may finish it in another way.
            batch.reopen()
            raise
        self.leases.discard(lease)
        self._views.watch(lease, views)

    async def release(self, batch: LeasedBatch, reason: str) -> None:
        """Release a lease undone: its samples are offered again. Arrays taken from the batch stay good."""
        await self._finish(self._release(batch.lease, reason, self._finish_batch(batch)))

    async def _release(self, lease: int, reason: str, views: list[weakref.ref[Any]]) -> None:
        self.leases.discard(lease)
        await self._call(lambda seq: self.api.release(seq, lease, reason, bool(views)))
        self._views.watch(lease, views)

    def _finish_batch(self, batch: LeasedBatch) -> list[weakref.ref[Any]]:
        """Drop a batch's memory, as far as nothing refers to it. Do so before the broker frees it."""
        views = batch.finish()
        if self._fetcher is not None:
            self._fetcher.release(batch.lease)
        return views

    def _dropped(self, lease: int, views: list[weakref.ref[Any]]) -> None:
        """A batch was garbage-collected before it was finished. Called by the collector, in any thread."""
        if self._loop is not None:
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._release_dropped, lease, views)

    def _release_dropped(self, lease: int, views: list[weakref.ref[Any]]) -> None:
        if self._closing or lease not in self.leases:
            return
        if self._fetcher is not None:
            self._fetcher.release(lease)
        self._later(self._release(lease, "its batch was forgotten", views))

    def _views_gone(self, leases: list[int]) -> None:
        if not self._closing:
            self._later(self._unpin(leases))

    async def _unpin(self, leases: list[int]) -> None:
        self._payload.free(await self._call(lambda seq: self.api.unpin(seq, leases)))

    # --- the trainer

    async def complete_step(
        self,
        batch: LeasedBatch | Sequence[LeasedBatch],
        step: int,
        weights: VersionRecord,
        *,
        skipped: bool = False,
    ) -> StepReply:
        """The optimizer step over the batch is done; the trainer's weights are now `weights`.

        Several batches are the parts of one step, leased one after the other (`lease` with at_least): they are trained
        together, or none is. Whatever else the caller holds for training ends: its samples are offered again.

        skipped: the step was thrown away; `weights` are those of before. The answer may ask for an early checkpoint.
        Arrays taken from the batch stay good: their memory is not used again before the last of them is gone.

        Raises:
            Refused: a lease lapsed, so that the step does not count: roll back to the last checkpoint.
        """
        batches = [batch] if isinstance(batch, LeasedBatch) else list(batch)
        return await self._finish(self._complete_step(batches, step, weights, skipped))

    async def _complete_step(
        self, batches: list[LeasedBatch], step: int, weights: VersionRecord, skipped: bool
    ) -> StepReply:
        views = {batch.lease: self._finish_batch(batch) for batch in batches if batch}
        leases, pinned = list(views), [lease for lease, left in views.items() if left]
        try:
            reply = await self._call(lambda seq: self.api.complete_step(seq, leases, step, weights, skipped, pinned))
        except StaleEpoch:
            raise
        except Refused:
            # The leases are lost. Release their pins here: no other call will.
            for lease, left in views.items():
                await self._release(lease, "the step does not count", left)
            raise
        for lease, left in views.items():
            self.leases.discard(lease)
            self._views.watch(lease, left)
        return reply

    async def filter_groups(self, batch: LeasedBatch, groups: Sequence[int], reason: str) -> LeasedBatch:
        """Leave groups of a batch out of the step; answers with the rest of it, which is empty if that was all.

        They end as dropped(filter), whatever happens to the step: their prompts are not issued again, and others
        are admitted in their place. Do not look at their columns any more.

        reason: for the event log, as `rule: why`; the account counts samples by rule.

        Raises:
            Refused: a group is not in the batch; or the lease lapsed: then roll back to the last checkpoint.
        """
        gone = set(groups)
        if strange := sorted(gone - {key.group for key in batch.keys}):
            raise Refused(f"filtering groups {strange}", why=f"lease {batch.lease} has no such group")
        return await self._finish(self._filter_groups(batch, sorted(gone), reason)) if gone else batch

    async def _filter_groups(self, batch: LeasedBatch, groups: list[int], reason: str) -> LeasedBatch:
        rest, lease = batch.without(groups), batch.lease
        views = [] if rest else self._finish_batch(batch)
        pinned = bool(views) or bool(rest and batch.drop_blocks_beside(rest))
        try:
            await self._call(lambda seq: self.api.filter_groups(seq, lease, groups, reason[:WHY], pinned))
        except StaleEpoch:
            raise
        except Refused:
            await self._release(lease, "the step does not count", self._finish_batch(batch))
            raise
        if not rest:
            self.leases.discard(lease)
            self._views.watch(lease, views)
        return rest

    async def request_surplus(self, groups: int) -> None:
        """Let so many groups be made beyond the staleness bound, until the next step; a later call replaces this one.

        `over_provision` counts if it is more. What of it an update makes over-stale ends as dropped(surplus).
        """
        await self._finish(self._call(lambda seq: self.api.request_surplus(seq, groups)))

    async def assign_items(self, items: Mapping[int, int]) -> ItemsAssigned:
        """Say which data item places of the prompt order are of, by the item's place in the data.

        Issued places keep their items, also when they are issued again; places that are not named follow the run's
        order. Returns the first place that was not issued.
        """
        assigned = dict(items)
        return await self._finish(self._call(lambda seq: self.api.assign_items(seq, assigned)))

    async def flush(self) -> None:
        """Force to disk what the queue has acknowledged so far: then it outlives its host as well."""
        await self._finish(self._call(lambda _: self.api.flush()))

    async def commit(self, step: int, checkpoint: str) -> None:
        """The checkpoint of `step` is in place."""
        await self._finish(self._call(lambda seq: self.api.commit(seq, step, checkpoint)))

    async def rollback(self, step: int, weights: VersionRecord) -> None:
        """The trainer starts from the checkpoint of `step` (0: none) with weights published as `weights`."""
        await self._finish(self._call(lambda seq: self.api.rollback(seq, step, weights)))

    # --- calls

    async def _finish(
        self, work: Coroutine[Any, Any, T], undo: Callable[[T], Coroutine[Any, Any, None]] | None = None
    ) -> T:
        """Carry work to its end also when the caller is cancelled; then undo what it was granted."""
        # A cancelled call may have reached the broker already. Were it cut off here, memory that the broker counts as
        # put could be written again, and a lease that it granted would be held by nobody until it lapses. So the call
        # runs in a task of its own, and only its caller is released. (asyncio.shield does the same with two more turns
        # of the event loop, which a single put would feel.)
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[T] = loop.create_future()
        task = loop.create_task(self._carry_out(work, outcome, undo))
        self._background.add(task)
        task.add_done_callback(functools.partial(self._carried_out, outcome))
        try:
            return await outcome
        except asyncio.CancelledError:
            # The caller may be cancelled after `_carry_out` set the result, before it resumes: nobody has the grant.
            if undo is not None and outcome.done() and not outcome.cancelled() and outcome.exception() is None:
                self._later(undo(outcome.result()))
            raise

    def _carried_out(self, outcome: asyncio.Future[Any], task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if task.cancelled() and not outcome.done():
            # By close(): the caller learns that nobody waits for the answer any more.
            why = "this end of the queue was closed while it was under way: it may have been carried out, or not"
            hint = "end your calls before you leave the queue"
            outcome.set_exception(Refused("call of the queue", why=why, hint=hint))

    @staticmethod
    async def _carry_out(
        work: Coroutine[Any, Any, T],
        outcome: asyncio.Future[T],
        undo: Callable[[T], Coroutine[Any, Any, None]] | None,
    ) -> None:
        try:
            result = await work
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # Without a caller there is no one to raise the error to; unfinished work lapses with the lease.
            if not outcome.done():
                outcome.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        if not outcome.done():
            outcome.set_result(result)
        elif undo is not None:
            await undo(result)

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this in the background."""

        def ended(task: asyncio.Future[None]) -> None:
            self._background.discard(task)
            # A fenced or disconnected client learns so from its next call; its pins end with the process.
            if not task.cancelled():
                task.exception()

        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(ended)

    async def _poll(self, wait_s: float, send: Callable[[int, float], Awaitable[P]]) -> P:
        """Ask in slices until there is something, or wait_s is over."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        # The first answer comes soon, and has the reason of a longer wait.
        longest_s = FIRST_SLICE_S
        with self._polls.wait() as wait:
            while True:
                left = max(0.0, deadline - loop.time())
                answer = await self._call_waiting(send, min(left, longest_s))
                # A lease without samples is to be released, and must not be forgotten.
                granted = isinstance(answer, LeaseGrant) and answer.lease > 0
                if not answer.waiting_on or left <= longest_s or self._closing or granted:
                    return answer
                wait(answer.waiting_on)
                longest_s = SLICE_S

    async def _call(self, send: Callable[[int], Awaitable[T]]) -> T:
        self._check_renewal()
        return await self._calls.call(send)

    async def _call_waiting(self, send: Callable[[int, float], Awaitable[T]], wait_s: float) -> T:
        self._check_renewal()
        return await self._calls.wait(send, wait_s)

    def _check_renewal(self) -> None:
        if self._renewal is not None and self._renewal.done():
            # Renewing failed for good, as with a fenced epoch: nothing held here is ours any more.
            self._renewal.result()

    async def _collect(self, short_bytes: int) -> list[Extent]:
        return await self._call(lambda seq: self.api.put_samples(seq, [], short_bytes))

    async def _send(self, puts: list[BlockPut], send: Callable[[int], Awaitable[list[Extent]]]) -> None:
        try:
            freed = await self._call(send)
        except Refused:
            # Only a refusal guarantees that no reader has the extents.
            self._payload.free(extents_in(puts))
            raise
        self._payload.free(freed)

    def _hold(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held.set()

    async def _keep_leases(self) -> None:
        """Renew three times within a lease; forget what lapsed, and report it. An idle client sends a heartbeat."""
        while True:
            if not self.groups and not self.leases:
                self._held.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(HEARTBEAT_S):
                        await self._held.wait()
            if self.groups or self.leases:
                await asyncio.sleep(self._lease_s / 3)
            groups, leases = list(self.groups), sorted(self.leases)
            try:
                lost = await self.api.renew(groups, leases)
            except (Unreachable, DeadlineExceeded):
                # The next round asks again; leases freeze while the broker is away.
                continue
            self.leases.difference_update(lost)
            mine = [group for group in lost if self.groups.pop(group, None) is not None]
            if mine and self._on_lost is not None:
                self._on_lost(mine)
