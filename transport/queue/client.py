"""The TransferQueue as a role uses it: puts arrays, takes views, keeps its leases."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from relax_rt.transport.memory.fields import check_row
from relax_rt.transport.memory.refs import Extent, owner_of
from relax_rt.transport.queue.batch import LeasedBatch, LeasedSample, extents_of
from relax_rt.transport.queue.ledger.messages import (
    Admission,
    Batch,
    Failure,
    ProgressReport,
    Put,
    SampleKey,
    VersionSpan,
    Want,
)
from relax_rt.transport.queue.offers import OFFER_WAIT_S
from relax_rt.transport.queue.session import SLICE_S
from relax_rt.transport.queue.space import Rows, puts_of
from relax_rt.transport.queue.steps import StepCalls
from relax_rt.transport.rpc.errors import DeadlineExceeded, Refused, RelaxError, StaleEpoch, Unreachable

__all__ = ["LeasedBatch", "LeasedSample", "NewSample", "QueueClient"]

_log = logging.getLogger("relax_rt.transport")


class NewSample(msgspec.Struct, frozen=True):
    """What a producer puts: all its columns of one sample, and the policy version of each token."""

    key: SampleKey
    columns: Mapping[str, Any]
    versions: list[VersionSpan]
    priority: float = 0.0


class QueueClient(StepCalls):
    """One incarnation's end of the TransferQueue, for one event loop. Use it as an async context manager.

    For its arguments see Session, for a trainer's calls StepCalls. Put and completion finish in the background when
    their caller is cancelled, and what a cancelled admit or take was granted is given back.
    """

    # --- producers of offers

    async def offer(
        self,
        rows: Rows,
        *,
        groups: list[int] | None = None,
        priorities: Sequence[float] | None = None,
        wait_s: float = OFFER_WAIT_S,
    ) -> list[SampleKey]:
        """Put samples that no ticket was drawn for; answers with their keys when they are journaled.

        groups: sizes of the groups that consecutive rows make; default: each is a group of its own.

        Raises:
            Refused: a value is not of its field's dtype or shape, or a sample is too large.
            OutOfSpace: the queue, or this incarnation's shared memory, stayed full for wait_s; nothing was put.
        """
        return await self._offers.rows(rows, groups, priorities, wait_s)

    async def offer_columns(
        self,
        columns: Mapping[str, Any],
        *,
        group: bool = False,
        priorities: Sequence[float] | None = None,
        wait_s: float = OFFER_WAIT_S,
    ) -> list[SampleKey]:
        """Put many samples at once, column by column: an array [samples, …], or a list with a value for each.

        group: they make one group; default: each is a group of its own.

        Raises: see `offer`.
        """
        return await self._finish(self._offers.columns(columns, group, priorities, wait_s))

    # --- producers of groups of prompts

    async def warm(self, nbytes: int = 1) -> None:
        """Pre-fault slabs of `nbytes` in all, at least one, so that puts need not."""
        await asyncio.to_thread(self.arena.warm, nbytes)

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
            await self.give_back([ticket.group for ticket in answer.tickets], "the request was cancelled")

    async def put_samples(self, samples: Sequence[NewSample]) -> None:
        """Put new samples of groups that this incarnation generates: one copy each, then one message.

        Raises:
            OutOfSpace: shared memory stayed full for space_wait_s.
            Refused: a sample is not one the caller may put (a group that was lost meanwhile is no error).
        """
        await self._finish(self._put_samples(samples))

    async def _put_samples(self, samples: Sequence[NewSample]) -> None:
        if not samples:
            return
        rows = [sample.columns for sample in samples]
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        placed = await self._space.rows(rows)
        puts = puts_of(
            placed,
            [sample.key for sample in samples],
            versions=[list(sample.versions) for sample in samples],
            priorities=[sample.priority for sample in samples],
        )
        await self._sent(puts, lambda seq: self.api.put(seq, puts))
        for sample in samples:
            left = self.groups.get(sample.key.group, 0) - 1
            if left > 0:
                self.groups[sample.key.group] = left
            else:
                self.groups.pop(sample.key.group, None)

    async def give_back(
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
        """Return unfinished groups; what is missing of them is given out again.

        failed: it could not be made, as when a task fails on a sample: what becomes of it is the policy's affair, and a
            prompt that fails too often is retired.
        losses: how often it was begun here and lost, through no fault of its own. What is lost again and again, with
            nothing made of it in between, has failed.
        """
        given = [*groups]
        for group in given:
            self.groups.pop(group, None)
        await self._finish(
            self._call(lambda seq: self.api.give_back(seq, given, reason, failed, losses, late, item, about))
        )

    async def skip(self, groups: Sequence[int]) -> None:
        """End these groups, whose items are in `retired`; other groups replace them."""
        given = [*groups]
        for group in given:
            self.groups.pop(group, None)
        await self._finish(self._call(lambda seq: self.api.skip(seq, given)))

    async def progress(self) -> ProgressReport:
        """Return the losses since the start of the run, and whether failed groups end it."""
        return await self._call(lambda _: self.api.progress())

    # --- consumers

    async def take(
        self,
        task: str,
        *,
        samples: int = 0,
        groups: int = 0,
        tokens: int = 0,
        at_least: int = 0,
        wait_s: float,
        want: Want | None = None,
    ) -> LeasedBatch:
        """Lease up to `samples` samples (of `tokens` tokens in all), or exactly `groups` whole groups, for a task.

        at_least: for training, fewer groups will do, as soon as so many are ready; `groups` is all that the step still
            lacks. Several such batches may be held: `trained` takes them all. The last one waits for stragglers.

        Raises:
            Unreachable: the broker did not answer for patience_s.
            Refused: there is no such task.
        """
        asked = want or Want(samples, groups, tokens, at_least=at_least)
        return await self._finish(self._take(task, asked, wait_s), self._return_batch)

    async def _take(self, task: str, want: Want, wait_s: float) -> LeasedBatch:
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            left_s = max(0.0, deadline - asyncio.get_running_loop().time())
            batch = await self._poll(left_s, lambda seq, slice_s: self.api.take(seq, task, want, slice_s))
            if not batch:
                if not batch.lease:
                    break
                lease = batch.lease
                await self._call(lambda seq: self.api.abandon(seq, lease, "it ended before its answer arrived"))  # noqa: B023
                continue
            self.leases.add(batch.lease)
            self._hold(batch.lease_s)
            try:
                if batch.remote:
                    await self._fetch(batch)
                break
            except (Unreachable, DeadlineExceeded) as error:
                if not self._fetch_s:
                    raise
                _log.warning("%s: samples given back: %s", self.who, error)
                batch = Batch(0, [], waiting_on=str(error))
                if asyncio.get_running_loop().time() >= deadline:
                    break
        return LeasedBatch(task, batch, self.reader.block, self._dropped)

    async def _fetch(self, batch: Batch) -> None:
        """Get the payload of a lease that lies on other nodes.

        Raises:
            Refused: this client cannot fetch.
            Gone, Unreachable, DeadlineExceeded, Corrupt, OutOfSpace: see Fetcher; the lease was given back.
        """
        if self._fetcher is None:
            raise Refused(f"payload on nodes {sorted(batch.remote)}", why="this client was made without a fetcher")
        wanted: dict[str, list[Extent]] = {}
        for extent in extents_of(batch):
            address = batch.remote.get(owner_of(extent.slab))
            if address is not None:
                wanted.setdefault(address, []).append(extent)
        wait, deadline_s = self._reasons.wait(), self._fetch_s or max(batch.lease_s, SLICE_S)
        wait(f"payload of lease {batch.lease} comes from {', '.join(wanted)}")
        try:
            await asyncio.gather(
                *(
                    self._fetcher.fetch(address, extents, lease=batch.lease, deadline_s=deadline_s)
                    for address, extents in wanted.items()
                )
            )
        except RelaxError as error:
            reason = str(error)
            self._fetcher.release(batch.lease)
            self.leases.discard(batch.lease)
            await self._call(lambda seq: self.api.abandon(seq, batch.lease, reason))
            raise
        finally:
            wait("")

    async def _return_batch(self, batch: LeasedBatch) -> None:
        if batch:
            await self.abandon(batch, "the request was cancelled")

    async def complete(
        self,
        task: str,
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
        await self._finish(self._complete(task, batch, columns or {}, failures, version))

    async def _complete(
        self,
        task: str,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]],
        failures: Sequence[Failure],
        version: int,
    ) -> None:
        keys, rows = list(columns), list(columns.values())
        if self._fields:
            rows = [check_row(self._fields, row) for row in rows]
        puts: list[Put] = []
        if rows:
            puts = puts_of(await self._space.rows(rows), keys, version=version)
        roots = self._done_with(batch)
        lease, failed = batch.lease, list(failures)
        try:
            await self._sent(puts, lambda seq: self.api.complete(seq, task, lease, puts, failed, bool(roots)))
        except StaleEpoch:
            raise
        except Refused:
            # The lease is as it was: the caller may finish it in another way.
            batch.reopen()
            raise
        self.leases.discard(lease)
        self._pins.keep(lease, roots)

    async def abandon(self, batch: LeasedBatch, reason: str) -> None:
        """Give a lease back undone. Arrays taken from the batch stay good."""
        await self._finish(self._abandon(batch, reason))

    async def _abandon(self, batch: LeasedBatch, reason: str) -> None:
        roots = self._done_with(batch)
        self.leases.discard(batch.lease)
        await self._abandon_lease(batch.lease, reason, roots)
