"""Dynamic sampling: groups without a learning signal are filtered out of a step, and further groups replace them.

`algorithms.filters` decides; this module applies the decisions to leases. Used by the collector.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    from relax_rt.transport.queue.batch import LeasedBatch
    from relax_rt.transport.queue.client import QueueClient


MAX_EXTRA_GROUPS = 65_536
"""Most groups beyond the staleness bound that a queue admits."""


class GroupFilter:
    """Adds the groups that pass the filters to a step's batch, and reports the others to the queue.

    Args:
        groups: number of groups of a step. rules: filters; the first that gives a reason decides.
        ahead: groups that the staleness bound admits for later steps; they serve this step as well.
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
        # The policy as a checkpoint may have it. While a step is not full it counts only the groups that were filtered
        # out: they never come again. Those that passed return to the queue if the step is not taken, and are judged
        # when they come again.
        self._saved = self.refill
        self._requested = self._reported = 0

    @classmethod
    def of(cls, config: RunConfig, queue: QueueClient, objective: Objective, event: Callable[..., None]) -> GroupFilter:
        """Make the filter of a run's config.

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
        """Start a step."""
        # The surplus that was requested ended with the step before.
        self._requested = 0
        self.refill.begin()
        self._saved = self.refill.copy()
        await self._request_surplus()

    async def filter_lease(self, lease: LeasedBatch, samples: list[Sample], batch: StepBatch, step: int) -> None:
        """Add the groups that pass to the batch; it is full when the step is to be taken with what there is.

        Args:
            samples: of the lease, in its order.
        """
        passed, filtered = self._judge(samples, batch, step)
        for why, keys in filtered.items():
            lease = await self._queue.filter_groups(lease, keys, why)
        if lease:
            batch.add(lease, passed)
        self._conclude(batch, step)
        await self._request_surplus()

    def _judge(self, given: list[Sample], batch: StepBatch, step: int) -> tuple[list[Sample], dict[str, list[int]]]:
        """Return the samples that pass, in order, and the filtered groups by reason."""
        passed: list[Sample] = []
        filtered: dict[str, list[int]] = {}
        groups: dict[int, list[Sample]] = {}
        for sample in given:
            groups.setdefault(sample.meta.group, []).append(sample)
        for key, samples in groups.items():
            truncated = [sample.meta.truncated for sample in samples]
            group = ScoredGroup(key, samples[0].meta.item, self._objective.rewards(samples), truncated)
            verdict = self.refill.scored(group, step)
            batch.scored += 1
            if verdict is None:
                passed += samples
            else:
                filtered.setdefault(verdict.why, []).append(key)
                self._saved.filtered(group, step, verdict)
                batch.filtered[verdict.rule] = batch.filtered.get(verdict.rule, 0) + 1
        return passed, filtered

    def _conclude(self, batch: StepBatch, step: int) -> None:
        state = self.refill.state
        batch.full = state in ("full", "short")
        if batch.full:
            self._saved, self._reported = self.refill, 0
        facts = {"scored": batch.scored, "filtered": dict(batch.filtered)}
        if state == "short":
            self._event("step_short", step=step, groups=batch.groups, of=self._groups, **facts)
        if state == "none_passed" and batch.scored >= 2 * self._reported:
            # The next group that passes makes a step; until then each doubling is reported.
            self._reported = batch.scored
            rate = self.refill.pass_rate
            self._event("groups_filtered", step=step, **facts, pass_rate=rate, passing=f"{rate:.1%}")

    async def _request_surplus(self) -> None:
        """Have admission let more groups be under way, where the staleness bound admits too few."""
        more = int(min(max(0.0, self.refill.spare - self._ahead), MAX_EXTRA_GROUPS))
        if more != self._requested:
            await self._queue.request_surplus(more)
            self._requested = more

    def state(self) -> dict[str, Any]:
        """Return plain data for the checkpoint."""
        return {"refill": self._saved.save(), "history": self._saved.history.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`; an empty one starts anew.

        Raises:
            Refused: it is not what `state` gave.
        """
        if state:
            self.refill.restore(state.get("refill", {}))
            self.history.restore(state.get("history", {}))
        else:
            self.refill.clear()
            self.history.clear()
