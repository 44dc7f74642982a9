"""Prompt samplers (curriculum, replay) in a run: the trainer assigns the next prompts before and after each step."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.data.source import PromptPositions, PromptSource
from relax_rt.roles.models.tokenizer import load_tokenizer
from relax_rt.roles.training.algorithms.prompt_history import PromptHistory
from relax_rt.roles.training.algorithms.registry import bind
from relax_rt.roles.training.algorithms.samplers import PromptSampler
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.transport.rpc.errors import Refused

if TYPE_CHECKING:
    from relax_rt.config.schema import RunConfig
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.base.sample import Sample
    from relax_rt.roles.training.algorithms.objective import Objective
    from relax_rt.transport.queue.client import QueueClient

MAX_LOOKAHEAD = 4096
"""Most places of the prompt order that are assigned at once."""


class PromptCurriculum:
    """Assigns prompts to the next places of the run's order, by the outcomes of earlier ones.

    Args:
        sampler: chooses the prompts. recorded: the filters write the history that it chooses by.
    """

    def __init__(self, queue: QueueClient, objective: Objective, sampler: PromptSampler, *, recorded: bool) -> None:
        self._queue, self._objective, self._recorded = queue, objective, recorded
        self.sampler = sampler

    @classmethod
    def of(
        cls,
        ctx: RoleContext,
        config: RunConfig,
        queue: QueueClient,
        objective: Objective,
        history: PromptHistory | None,
    ) -> PromptCurriculum:
        """Make the curriculum of a run's config. Reads the data, so call it in a thread.

        Args:
            history: of the filters; None: there are none.

        Raises:
            Refused: the sampler is unknown or wrong.
            RelaxError: bad data.
        """
        from relax_rt.roles.base.locations import model_folder

        table, base, seed = config.table(AlgorithmTable), Path(config.config_dir), config.run.seed
        assert table.sampler is not None
        rule = bind("sampler", table.sampler, ("algorithm", "sampler"), base=base, defaults={})
        if isinstance(rule, list):
            raise Refused("algorithm.sampler", why=rule[0].message, hint=rule[0].hint)
        tokenizer = load_tokenizer(model_folder(ctx))
        source = PromptSource.load(config.table(DataTable), tokenizer, seed=seed, config_dir=base, run_dir=ctx.run_dir)
        # So many places as admission may give out before the next choice, and a batch more; beyond them the run's own
        # order holds. With filters a step may cost several times its groups.
        steps = table.max_staleness + 2 + (table.refill.most if table.filters else 0)
        most = steps * table.prompts_per_step + table.over_provision
        ids = source.train.ids
        sampler = PromptSampler(
            rule,
            ids,
            source.place,
            seed=seed,
            history=PromptHistory() if history is None else history,
            places=PromptPositions(ids),
            ahead=MAX_LOOKAHEAD if math.isinf(most) else min(math.ceil(most), MAX_LOOKAHEAD),
            end=source.limit,
        )
        return cls(queue, objective, sampler, recorded=history is not None)

    async def choose(self, step: int) -> None:
        """Assign the next prompts, by what is known after `step`."""
        first = (await self._queue.assign_items({})).next_index
        await self._queue.assign_items(self.sampler.choose_next(step, first))

    async def after_step(self, samples: list[Sample], step: int) -> None:
        """Record the samples of a step that was trained, and assign the next prompts."""
        if not self._recorded:
            groups: dict[int, list[Sample]] = {}
            for sample in samples:
                groups.setdefault(sample.meta.group, []).append(sample)
            for members in groups.values():
                self.sampler.history.record(members[0].meta.item, self._objective.rewards(members), step)
        await self.choose(step)
