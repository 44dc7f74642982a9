"""Dynamic sampling in a run: what comes for a step is judged, and others are made for what is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_rt.roles.base.sample import read_sample
from relax_rt.roles.training.algorithms.filters import RefillPolicy, ScoredGroup
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import BoundPart, bind
from relax_rt.roles.training.algorithms.settings import AlgorithmTable, RefillOptions
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.roles.training.step import StepBatch
    from relax_rt.transport.queue.client import LeasedBatch, QueueClient


MAX_EXTRA_GROUPS = 65_536
"""Groups beyond the bound that a queue admits at all."""


class GroupFilter:
    """Puts into a step's batch what the filters let through, and tells the queue of the rest.

    Args:
        groups: of a step. rules: filters, the first that gives a reason decides.
        ahead: groups that the staleness bound lets be under way for later steps; they will do for this one as well.
        event: writes into the run's events.
    """

    def __init__(
        self,
        queue: QueueClient,
        objective: Objective,
        rules: Sequence[BoundPart],
        options: RefillOptions,
        *,
        groups: int,
        ahead: float,
        event: Callable[..., None],
    ) -> None:
        self._queue, self._objective, self._groups, self._ahead, self._event = queue, objective, groups, ahead, event
        self.history = PromptHistory()
        self.refill = RefillPolicy(groups, rules, self.history, options)
        self._settled = self.refill
        self._asked = self._told = 0

    @classmethod
    def of(cls, config: RunConfig, queue: QueueClient, objective: Objective, event: Callable[..., None]) -> GroupFilter:
        """The group_filter of a run with filters.

        Raises:
            Refused: a filter is unknown or wrong.
        """
        table, base = config.table(AlgorithmTable), Path(config.config_dir)
        groups = table.prompts_per_step
        found = [bind("filter", given, ("algorithm", "filters"), base=base, defaults={}) for given in table.filters]
        for problem in (problem for one in found if isinstance(one, list) for problem in one):
            raise Refused("algorithm.filters", why=problem.message, hint=problem.hint)
        rules = [one for one in found if not isinstance(one, list)]
        ahead = table.max_staleness * groups
        return cls(queue, objective, rules, table.refill, groups=groups, ahead=ahead, event=event)

    async def begin(self) -> None:
        """A step begins."""
        # What was asked for ended with the step before.
        self._asked = 0
        self.refill.begin()
        self._settled = self.refill.copy()
        await self._ask()

    async def filter_lease(self, lease: LeasedBatch, batch: StepBatch, step: int) -> None:
        """Put the groups that are kept into the batch; it is full when the step is to be taken with what there is."""
        kept, left_out = self._judge(lease, batch, step)
        for why, keys in left_out.items():
            lease = await self._queue.filter_groups(lease, keys, why)
        if lease:
            batch.add(lease, kept)
        self._conclude(batch, step)
        await self._ask()

    def _judge(self, lease: LeasedBatch, batch: StepBatch, step: int) -> tuple[list[Sample], dict[str, list[int]]]:
        """The samples that are kept, in order, and the groups that are not, by the reason."""
        kept: list[Sample] = []
        left_out: dict[str, list[int]] = {}
        for key, members in lease.groups().items():
            samples = [read_sample(one) for one in members]
            cut = [sample.meta.truncated for sample in samples]
            group = ScoredGroup(key, samples[0].meta.item, self._objective.rewards(samples), cut)
            drop = self.refill.scored(group, step)
            batch.scored += 1
            if drop is None:
                kept += samples
            else:
                left_out.setdefault(drop.why, []).append(key)
                self._settled.left_out(group, step, drop)
                batch.filtered[drop.rule] = batch.filtered.get(drop.rule, 0) + 1
        return kept, left_out

    def _conclude(self, batch: StepBatch, step: int) -> None:
        state = self.refill.state
        batch.full = state in ("full", "short")
        if batch.full:
            self._settled, self._told = self.refill, 0
        facts = {"scored": batch.scored, "filtered": dict(batch.filtered)}
        if state == "short":
            self._event("step_short", step=step, groups=batch.groups, of=self._groups, **facts)
        if state == "barren" and batch.scored >= 2 * self._told:
            # The next group that passes makes a step; until then each doubling is reported.
            self._told = batch.scored
            rate = self.refill.share
            self._event("groups_filtered", step=step, **facts, pass_rate=rate, passing=f"{rate:.1%}")

    async def _ask(self) -> None:
        """Have admission let more groups be under way, where the staleness bound lets too few."""
        more = int(min(max(0.0, self.refill.spare - self._ahead), MAX_EXTRA_GROUPS))
        if more != self._asked:
            await self._queue.request_surplus(more)
            self._asked = more

    def state(self) -> dict[str, Any]:
        """Plain data for the checkpoint.

        Of a step that is not full it has the groups that were left out, which never come again. Those that were kept go
        back to the queue if the step is not taken, and are judged when they come again.
        """
        return {"refill": self._settled.save(), "history": self._settled.history.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`; anew from one that is empty.

        Raises:
            Refused: it is not what `state` gave.
        """
        if state:
            self.refill.restore(state.get("refill", {}))
            self.history.restore(state.get("history", {}))
        else:
            self.refill.clear()
            self.history.clear()
