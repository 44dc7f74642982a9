"""A trainer's calls: steps, what is left out of them, what else is to be made, checkpoints, roll-backs."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.ledger.messages import WHY, Advice, Chosen
from relax_rt.transport.queue.session import Session
from relax_rt.transport.rpc.errors import Refused, StaleEpoch


class StepCalls(Session):
    """What a trainer tells the queue."""

    async def trained(
        self,
        batch: LeasedBatch | Sequence[LeasedBatch],
        step: int,
        weights: VersionRecord,
        *,
        skipped: bool = False,
    ) -> Advice:
        """The optimizer step over the batch is done; the trainer's weights are now `weights`.

        Several batches are the parts of one step, taken one after the other (`take` with at_least): they are trained
        together, or none is. Whatever else the caller holds for training ends: its samples are offered again.

        skipped: the step was thrown away; `weights` are those of before. The answer may ask for an early checkpoint.
        Arrays taken from the batch stay good: their memory is not used again before the last of them is gone.

        Raises:
            Refused: a lease lapsed, so that the step does not count: roll back to the last checkpoint.
        """
        batches = [batch] if isinstance(batch, LeasedBatch) else list(batch)
        return await self._finish(self._trained(batches, step, weights, skipped))

    async def _trained(self, batches: list[LeasedBatch], step: int, weights: VersionRecord, skipped: bool) -> Advice:
        roots = {batch.lease: self._done_with(batch) for batch in batches if batch}
        leases, pinned = list(roots), [lease for lease, left in roots.items() if left]
        try:
            advice = await self._call(lambda seq: self.api.trained(seq, leases, step, weights, skipped, pinned))
        except StaleEpoch:
            raise
        except Refused:
            for lease, left in roots.items():
                await self._give_up(lease, left)
            raise
        for lease, left in roots.items():
            self.leases.discard(lease)
            self._pins.keep(lease, left)
        return advice

    async def filtered(self, batch: LeasedBatch, groups: Sequence[int], reason: str) -> LeasedBatch:
        """Leave groups of a batch out of the step; answers with the rest of it, which is empty if that was all.

        They end as dropped(filter), whatever becomes of the step: their prompts are not given out again, and others
        are admitted in their place. Do not look at their columns any more.

        reason: for the event log, as `rule: why`; the account counts samples by rule.

        Raises:
            Refused: a group is not in the batch; or the lease lapsed: then roll back to the last checkpoint.
        """
        gone = set(groups)
        if strange := sorted(gone - {key.group for key in batch.keys}):
            raise Refused(f"filtering groups {strange}", why=f"lease {batch.lease} has no such group")
        return await self._finish(self._filtered(batch, sorted(gone), reason)) if gone else batch

    async def _filtered(self, batch: LeasedBatch, groups: list[int], reason: str) -> LeasedBatch:
        rest, lease = batch.without(groups), batch.lease
        left = [] if rest else self._done_with(batch)
        pinned = bool(left) or bool(rest and batch.let_go(rest))
        try:
            await self._call(lambda seq: self.api.filtered(seq, lease, groups, reason[:WHY], pinned))
        except StaleEpoch:
            raise
        except Refused:
            await self._give_up(lease, self._done_with(batch))
            raise
        if not rest:
            self.leases.discard(lease)
            self._pins.keep(lease, left)
        return rest

    async def _give_up(self, lease: int, roots: list[weakref.ref[Any]]) -> None:
        """It is not worked on any more, and nobody else will say that its memory is not read."""
        self.leases.discard(lease)
        await self._abandon_lease(lease, "the step does not count", roots)

    async def ask(self, groups: int) -> None:
        """Let so many groups be made beyond the staleness bound, until the next step; a later word counts instead.

        `over_provision` counts if it is more. What of it an update makes over-stale ends as dropped(surplus).
        """
        await self._finish(self._call(lambda seq: self.api.ask(seq, groups)))

    async def choose(self, items: Mapping[int, int]) -> Chosen:
        """Say which data item places of the prompt order are of, by the item's place in the data.

        Places that were given out keep what they had, also when they are given out again; so do those that nothing is
        said of: they are of the run's order. Answers with the first place that was not given out.
        """
        chosen = dict(items)
        return await self._finish(self._call(lambda seq: self.api.choose(seq, chosen)))

    async def flush(self) -> None:
        """Force to disk what the queue has acknowledged so far: then it outlives its host as well."""
        await self._finish(self._call(lambda _: self.api.flush()))

    async def committed(self, step: int, checkpoint: str) -> None:
        """The checkpoint of `step` is in place."""
        await self._finish(self._call(lambda seq: self.api.committed(seq, step, checkpoint)))

    async def rollback(self, step: int, weights: VersionRecord) -> None:
        """The trainer starts from the checkpoint of `step` (0: none) with weights published as `weights`."""
        await self._finish(self._call(lambda seq: self.api.rollback(seq, step, weights)))
