"""Collects the groups of one optimizer step from the queue. Used by the trainer role."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from relax_rt.roles.base.sample import read_sample
from relax_rt.roles.training.algorithms.registry import UserPartFailed
from relax_rt.roles.training.step import StepBatch, StepTimer
from relax_rt.transport.rpc.errors import RelaxError, Unreachable

if TYPE_CHECKING:
    from relax_rt.interfaces.role import Progress
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.training.dynamic_sampling import GroupFilter
    from relax_rt.transport.queue.batch import LeasedBatch
    from relax_rt.transport.queue.client import QueueClient


ReadShares: TypeAlias = "Callable[[LeasedBatch, bool], tuple[list[Sample], dict[str, int]]]"
"""Reads a lease, the first of a step or a further one; see `Leader.read`."""
LEASE_WAIT_S = 1.0
"""Short, so that a request to stop is soon seen."""


class Collector:
    """Leases the groups of one step after the other.

    Args:
        groups: number of groups of a step.
        parts: lease groups as they become ready, instead of all of a step at once.
        group_filter: dynamic sampling; implies `parts`.
        read_shares: has the replicas of a gang read a lease, see `Leader.read`; blocks. None: this process reads it.
    """

    def __init__(
        self,
        queue: QueueClient,
        progress: Progress,
        *,
        groups: int,
        parts: bool = False,
        group_filter: GroupFilter | None = None,
        read_shares: ReadShares | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._queue, self._progress, self._groups, self._clock = queue, progress, groups, clock
        self._parts, self.group_filter = parts or group_filter is not None, group_filter
        self._read_shares = read_shares
        self._batch: StepBatch | None = None
        self.waiting_for = ""
        """What the last call of `collect` waited for when it timed out."""

    async def collect(self, step: int) -> StepBatch | None:
        """Lease what is ready of a step's groups, waiting for a second at most.

        Returns:
            All that the step has so far, or None if nothing came. After a full batch the next call begins a new one.

        Raises:
            UserPartFailed: a user's filter failed; the lease that it was to judge is released.
            RelaxError: the payload of a lease cannot be read; the lease is released.
        """
        if self._batch is None:
            # A wait may take many calls; the timer starts with the first of them.
            self._batch = StepBatch(StepTimer(self._clock))
            if self.group_filter is not None:
                await self.group_filter.begin()
        batch = self._batch
        lacking = self._groups - batch.groups
        lease = await self._queue.lease(
            "train",
            groups=lacking,
            at_least=int(self._parts),
            wait_s=LEASE_WAIT_S,
            fetch=self._read_shares is None,
        )
        if not lease:
            there = f"{batch.groups} of {self._groups} groups are there; " if batch.groups else ""
            self.waiting_for = there + (lease.waiting_on or "whole groups with rewards")
            self._progress.waiting(self.waiting_for)
            return None
        self._progress.waiting("")
        samples = await self._read(lease, batch)
        batch.timer.lap("wait")
        if samples is None:
            return None
        if self.group_filter is None:
            batch.add(lease, samples)
        else:
            try:
                await self.group_filter.filter_lease(lease, samples, batch, step)
            except UserPartFailed:
                await self._queue.release(lease, "a filter failed")
                raise
        batch.full = batch.full or batch.groups >= self._groups
        if batch.full:
            self._batch = None
        return batch

    async def _read(self, lease: LeasedBatch, batch: StepBatch) -> list[Sample] | None:
        """Read the samples of a lease; None if their payload did not come in time: the lease is released then."""
        if self._read_shares is None:
            return [read_sample(one) for one in lease.samples]
        try:
            samples, received = await asyncio.to_thread(self._read_shares, lease, not batch.leases)
        except RelaxError as error:
            await self._queue.release(lease, str(error))
            if not isinstance(error, Unreachable):
                raise
            # Its owner may be dead, and the queue about to hear of that.
            self.waiting_for = str(error)
            self._progress.waiting(self.waiting_for)
            return None
        for node, nbytes in received.items():
            batch.received_bytes[node] = batch.received_bytes.get(node, 0) + nbytes
        return samples

    async def release(self, reason: str) -> None:
        """Release the leases of a step that will not be taken. Raises as `release_leases` does."""
        await release_leases(self._queue, self.pop_leases(), reason)

    def pop_leases(self) -> list[LeasedBatch]:
        """Return the leases of a step that will not be taken, and forget them; the caller releases them."""
        batch, self._batch = self._batch, None
        return batch.leases if batch is not None else []


async def release_leases(queue: QueueClient, leases: Sequence[LeasedBatch], reason: str) -> None:
    """Release each of the leases undone, also when others fail.

    Raises:
        RelaxError: the first failure, when all have been tried.
    """
    failures = list[RelaxError]()
    for lease in leases:
        try:
            await queue.release(lease, reason)
        except RelaxError as error:
            failures.append(error)
    if failures:
        raise failures[0]
