"""The TransferQueue as a role uses it: puts arrays, takes views, keeps its leases."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from relax_rt.transport.arena import Reader, Writer
from relax_rt.transport.backoff import Backoff, BackoffPolicy
from relax_rt.transport.errors import DeadlineExceeded, OutOfSpace, Refused, Unreachable
from relax_rt.transport.identity import Incarnation
from relax_rt.transport.ledger.extents import extents_of
from relax_rt.transport.queue.api import (
    Admission,
    Batch,
    Column,
    Failure,
    Freed,
    Put,
    QueueApi,
    SampleInfo,
    SampleKey,
    VersionSpan,
)
from relax_rt.transport.versions import VersionRecord

WINDOW = 64
"""No call is sent whose number is this much higher than one without an answer: the broker keeps the answers of twice
as many (callers.ANSWERS_KEPT), so that a call sent again is always recognised."""
_SLICE_S = 1.0
"""Long waits are made of calls of this length, so that none holds the window for long."""
_BACKOFF = BackoffPolicy(base_s=0.05, cap_s=1.0)
_SPACE_POLL_S = 0.1

T = TypeVar("T")
P = TypeVar("P", Admission, Batch)


async def _sliced(send: Callable[[int, float], Awaitable[P]], slice_s: float, seq: int) -> P:
    return await send(seq, slice_s)


class NewSample(msgspec.Struct, frozen=True):
    """What a producer puts: all its columns of one sample, and the policy version of each token."""

    key: SampleKey
    columns: Mapping[str, Any]
    versions: list[VersionSpan]


class LeasedSample:
    """A sample on lease; ``sample["tokens"]`` is a read-only view in shared memory (see Reader.view).

    Views are good until the lease is completed, abandoned or trained. Copy what must outlive that.
    """

    def __init__(self, info: SampleInfo, reader: Reader) -> None:
        self.info = info
        self.key, self.prompt, self.attempt = info.key, info.prompt, info.attempt
        self.versions, self.staleness = info.versions, info.staleness
        self._columns = {column.name: column for column in info.columns}
        self._reader = reader

    @property
    def names(self) -> list[str]:
        """Names of its columns."""
        return list(self._columns)

    def __contains__(self, name: str) -> bool:
        return name in self._columns

    def __getitem__(self, name: str) -> Any:
        return self._reader.view(self._columns[name])

    def decode(self, name: str, type_: type[T]) -> T:
        """A msgpack column as an object of the given type."""
        value: T = self._reader.decode(self._columns[name], type_)
        return value


class LeasedBatch:
    """Samples on lease. Empty (and false) when nothing was ready in time: `waiting_on` says why."""

    def __init__(self, batch: Batch, reader: Reader) -> None:
        self.lease, self.waiting_on = batch.lease, batch.waiting_on
        self.samples = [LeasedSample(info, reader) for info in batch.samples]

    def __bool__(self) -> bool:
        return bool(self.samples)

    def groups(self) -> dict[int, list[LeasedSample]]:
        """The samples by group, in the order of the batch."""
        groups: dict[int, list[LeasedSample]] = {}
        for sample in self.samples:
            groups.setdefault(sample.key.group, []).append(sample)
        return groups


class QueueClient:
    """One incarnation's end of the TransferQueue, for one event loop. Use it as an async context manager.

    Every changing call carries a sequence number and is sent again, with the same number, when the broker cannot be
    reached, for up to patience_s: the broker knows it again and answers as before (see WINDOW). Put and completion
    finish in the background when their caller is cancelled, and what a cancelled admit or take was granted is given
    back.

    Args:
        api: the broker's interface.
        who: this incarnation, as the broker sees it.
        shm_dir: the run's directory in shared memory.
        slab_bytes, capacity_bytes: size of one slab, and of all slabs of this incarnation.
        patience_s: how long a broker that cannot be reached is asked again (it restarts within seconds).
        space_wait_s: how long a put waits for room in shared memory.
        on_lost: gets ids of groups that are no longer this incarnation's (lapsed or revoked): stop working on them.
        on_wait: gets the reason of a wait, and an empty string when it ends; for the role's progress.
    """

    def __init__(
        self,
        api: QueueApi,
        who: Incarnation,
        shm_dir: Path,
        *,
        slab_bytes: int = 16 << 20,
        capacity_bytes: int = 256 << 20,
        patience_s: float = 120.0,
        space_wait_s: float = 60.0,
        on_lost: Callable[[list[int]], None] | None = None,
        on_wait: Callable[[str], None] | None = None,
    ) -> None:
        self.api, self.who = api, who
        self.arena = Writer(shm_dir, who, slab_bytes=slab_bytes, capacity_bytes=capacity_bytes)
        self.reader = Reader(shm_dir)
        self.groups: dict[int, int] = {}
        """Tickets held: members not yet put, by group."""
        self.leases: set[int] = set()
        self._patience_s, self._space_wait_s = patience_s, space_wait_s
        self._on_lost, self._on_wait = on_lost, on_wait
        self._seq = 0
        self._rng = random.Random(str(who))
        self._unanswered: set[int] = set()
        self._answered = asyncio.Event()
        self._closing = False
        self._lease_s = 60.0
        self._renewal: asyncio.Task[None] | None = None
        self._background: set[asyncio.Future[Any]] = set()
        self._held = asyncio.Event()

    async def __aenter__(self) -> QueueClient:
        self._renewal = asyncio.create_task(self._keep_leases())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop renewing; finish what is under way. Leases still held lapse, or end with `gone`."""
        self._closing = True
        if self._background:
            await asyncio.wait(self._background, timeout=_SLICE_S)
        pending = [*self._background, *([self._renewal] if self._renewal else [])]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        self.arena.close()
        self.reader.close()

    # --- producers

    async def warm(self) -> None:
        """Pre-fault the first slab, so that the first put need not."""
        await asyncio.to_thread(self.arena.warm)

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
            self.groups[ticket.group] = ticket.size
            self._hold(ticket.lease_s)
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
        columns = await self._place([sample.columns for sample in samples])
        puts = [Put(sample.key, placed, list(sample.versions)) for sample, placed in zip(samples, columns, strict=True)]
        await self._sent(puts, lambda seq: self.api.put(seq, puts))
        for sample in samples:
            left = self.groups.get(sample.key.group, 0) - 1
            if left > 0:
                self.groups[sample.key.group] = left
            else:
                self.groups.pop(sample.key.group, None)

    async def give_back(self, groups: Sequence[int], reason: str) -> None:
        """Return unfinished groups; their prompts are given out again."""
        for group in groups:
            self.groups.pop(group, None)
        await self._finish(self._call(lambda seq: self.api.give_back(seq, list(groups), reason)))

    # --- consumers

    async def take(self, task: str, *, samples: int = 0, groups: int = 0, wait_s: float) -> LeasedBatch:
        """Lease up to `samples` samples, or exactly `groups` whole groups, that are ready for a task.

        Raises:
            Unreachable: the broker did not answer for patience_s.
            Refused: there is no such task.
        """
        return await self._finish(self._take(task, samples, groups, wait_s), self._return_batch)

    async def _take(self, task: str, samples: int, groups: int, wait_s: float) -> LeasedBatch:
        batch = await self._poll(wait_s, lambda seq, slice_s: self.api.take(seq, task, samples, groups, slice_s))
        if batch.samples:
            self.leases.add(batch.lease)
            self._hold(batch.lease_s)
        return LeasedBatch(batch, self.reader)

    async def _return_batch(self, batch: LeasedBatch) -> None:
        if batch:
            await self.abandon(batch, "the request was cancelled")

    async def complete(
        self,
        task: str,
        batch: LeasedBatch,
        columns: Mapping[SampleKey, Mapping[str, Any]],
        failures: Sequence[Failure] = (),
    ) -> None:
        """Finish a lease with new columns for its samples, and those that failed.

        If the lease lapsed meanwhile this has no effect on the samples, and is no error.
        """
        await self._finish(self._complete(task, batch.lease, columns, failures))

    async def _complete(
        self, task: str, lease: int, columns: Mapping[SampleKey, Mapping[str, Any]], failures: Sequence[Failure]
    ) -> None:
        placed = await self._place(list(columns.values()))
        puts = [Put(key, one) for key, one in zip(columns, placed, strict=True)]
        await self._sent(puts, lambda seq: self.api.complete(seq, task, lease, puts, list(failures)))
        self.leases.discard(lease)

    async def abandon(self, batch: LeasedBatch, reason: str) -> None:
        """Give a lease back undone."""
        self.leases.discard(batch.lease)
        await self._finish(self._call(lambda seq: self.api.abandon(seq, batch.lease, reason)))

    # --- the trainer

    async def trained(self, batch: LeasedBatch, step: int, weights: VersionRecord) -> None:
        """The optimizer step over the batch is done; the trainer's weights are now `weights`.

        Raises:
            Refused: the lease lapsed, so that the step does not count: roll back to the last checkpoint.
        """
        await self._finish(self._call(lambda seq: self.api.trained(seq, batch.lease, step, weights)))
        self.leases.discard(batch.lease)

    async def committed(self, step: int, checkpoint: str) -> None:
        """The checkpoint of `step` is in place."""
        await self._finish(self._call(lambda seq: self.api.committed(seq, step, checkpoint)))

    async def rollback(self, step: int, weights: VersionRecord) -> None:
        """The trainer starts from the checkpoint of `step` (0: none) with weights published as `weights`."""
        await self._finish(self._call(lambda seq: self.api.rollback(seq, step, weights)))

    # --- calls

    async def _finish(self, work: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[None]] | None = None) -> T:
        """Carry work to its end also when the caller is cancelled; then undo what it was granted."""
        task = asyncio.ensure_future(work)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            orphan = asyncio.ensure_future(self._settle(task, undo))
            self._background.add(orphan)
            orphan.add_done_callback(self._background.discard)
            raise

    async def _settle(self, task: asyncio.Future[T], undo: Callable[[T], Awaitable[None]] | None) -> None:
        # The caller is gone: an error has nobody to go to, and what it left undone lapses with the lease.
        (result,) = await asyncio.gather(task, return_exceptions=True)
        if undo is not None and not isinstance(result, BaseException):
            await undo(result)

    async def _poll(self, wait_s: float, send: Callable[[int, float], Awaitable[P]]) -> P:
        """Ask in slices until there is something, or wait_s is over."""
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            left = max(0.0, deadline - asyncio.get_running_loop().time())
            slice_s = min(left, _SLICE_S)
            answer = await self._call(partial(_sliced, send, slice_s))
            if not answer.waiting_on or left <= _SLICE_S or self._closing:
                return answer

    async def _call(self, send: Callable[[int], Awaitable[T]]) -> T:
        """Send a changing call, again and again with the same number until it is answered or patience ends."""
        if self._renewal is not None and self._renewal.done():
            # Renewing failed for good, as with a fenced epoch: nothing held here is ours any more.
            self._renewal.result()
        while self._unanswered and self._seq + 1 - min(self._unanswered) >= WINDOW:
            self._answered.clear()
            await self._answered.wait()
        self._seq += 1
        seq = self._seq
        self._unanswered.add(seq)
        try:
            return await self._answer(seq, send)
        finally:
            self._unanswered.discard(seq)
            self._answered.set()

    async def _answer(self, seq: int, send: Callable[[int], Awaitable[T]]) -> T:
        loop = asyncio.get_running_loop()
        deadline: float | None = None
        backoff = Backoff(_BACKOFF, self._rng)
        while True:
            try:
                answer = await send(seq)
            except (Unreachable, DeadlineExceeded) as error:
                now = loop.time()
                deadline = now + self._patience_s if deadline is None else deadline
                if now >= deadline:
                    raise
                self._waits(f"the queue cannot be reached: {error}")
                await asyncio.sleep(backoff.next_delay_s() or 0.0)
                continue
            if deadline is not None:
                self._waits("")
            return answer

    async def _sent(self, puts: list[Put], send: Callable[[int], Awaitable[list[Freed]]]) -> None:
        try:
            freed = await self._call(send)
        except Refused:
            # Only after a refusal is it sure that nobody reads the extents.
            for put in puts:
                self._free(extents_of(put.columns))
            raise
        self._free(freed)

    async def _place(self, values: Sequence[Mapping[str, Any]]) -> list[list[Column]]:
        """Copy into the arena, waiting for freed extents when it is full."""
        deadline = asyncio.get_running_loop().time() + self._space_wait_s
        placed: list[list[Column]] = []
        waited = False
        try:
            for columns in values:
                while True:
                    try:
                        placed.append(self.arena.put(columns))
                        break
                    except OutOfSpace as error:
                        if asyncio.get_running_loop().time() >= deadline:
                            raise
                        waited = True
                        self._waits(str(error))
                    self._free(await self._call(lambda seq: self.api.put(seq, [])))
                    await asyncio.sleep(_SPACE_POLL_S)
        except BaseException:
            for one in placed:
                self._free(extents_of(one))
            raise
        finally:
            if waited:
                self._waits("")
        return placed

    def _free(self, extents: Sequence[Freed]) -> None:
        for extent in extents:
            self.arena.free(extent)

    def _waits(self, reason: str) -> None:
        if self._on_wait is not None:
            self._on_wait(reason)

    # --- leases

    def _hold(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._held.set()

    async def _keep_leases(self) -> None:
        """Renew three times within a lease; forget what is no longer ours, and say so."""
        while True:
            if not self.groups and not self.leases:
                self._held.clear()
                await self._held.wait()
            await asyncio.sleep(self._lease_s / 3)
            groups, leases = list(self.groups), sorted(self.leases)
            if not groups and not leases:
                continue
            try:
                lost = await self.api.renew(groups, leases)
            except (Unreachable, DeadlineExceeded):
                # The next round asks again; leases freeze while the broker is away.
                continue
            self.leases.difference_update(lost)
            mine = [group for group in lost if self.groups.pop(group, None) is not None]
            if mine and self._on_lost is not None:
                self._on_lost(mine)
