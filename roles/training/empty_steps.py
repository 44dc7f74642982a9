"""Counts steps that train nothing, and says why they do and what helps. Used by the trainer role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_rt.config.schema import RunConfig
from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.base.settings import ProgressTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.objective import Objective
from relax_rt.roles.training.algorithms.settings import AlgorithmTable
from relax_rt.roles.training.backend.interface import StepResult
from relax_rt.roles.training.step import StepBatch


class EmptySteps:
    """Counts consecutive steps of which no sample had a part in the gradient.

    They are reported after `progress.empty_steps` of them, and whenever their number has doubled.
    """

    def __init__(self, ctx: RoleContext, objective: Objective) -> None:
        self._ctx, self._objective = ctx, objective
        self._limit = ctx.config.table(ProgressTable).empty_steps
        self._count, self._reason = 0, ""

    def note(self, batch: StepBatch, result: StepResult, step: int, *, empty: bool) -> None:
        """Count a step. A skipped update says nothing about its samples: the count stays.

        Args:
            empty: the step had no token to train.
        """
        if not result.applied:
            return
        self._reason = ""
        if empty:
            self._reason = _no_token(self._ctx.config, batch.samples)
            self._ctx.event("step_empty", step=step, why=self._reason)
        elif all(self._objective.idle(sample) for sample in batch.samples):
            self._reason = _no_advantage(self._ctx.config, batch.samples, batch.masked_tokens)
        self._count = self._count + 1 if self._reason else 0
        times, rest = divmod(self._count, self._limit)
        if times and not rest and not times & (times - 1):
            self._ctx.event("steps_empty", step=step, steps=self._count, why=self._reason)
            self._ctx.log.warning("steps that trained nothing", steps=self._count, why=self._reason)

    def record(self) -> dict[str, Any]:
        """Fields of a step's metrics."""
        return {"empty_steps": self._count, "empty_reason": self._reason if self._count >= self._limit else ""}


def _no_token(config: RunConfig, samples: Sequence[Sample]) -> str:
    """Say why a step without a token to train trained nothing, and what helps."""
    cut = sum(sample.meta.truncated for sample in samples)
    limit, truncated = config.table(SamplingTable).max_new_tokens, config.table(AlgorithmTable).truncated
    return (
        f"none of {len(samples)} samples has a token to train; {cut} were cut at sampling.max_new_tokens = {limit}"
        f' (algorithm.truncated = "{truncated}")'
    )


def _no_advantage(config: RunConfig, samples: Sequence[Sample], masked_tokens: int) -> str:
    """Say why the advantages of a step are all 0, and what helps.

    Args:
        masked_tokens: tokens whose advantage the loss set to 0 before the update.
    """
    if masked_tokens:
        hint = "a lower algorithm.max_staleness, or a wider trust region in algorithm.loss"
        return f"the loss set the advantages of all {masked_tokens} tokens that had one to 0; what helps: {hint}"
    rewards: dict[int, set[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.meta.group, set()).add(sample.reward or 0.0)
    equal = all(len(values) == 1 for values in rewards.values())
    mean = sum(sample.reward or 0.0 for sample in samples) / len(samples)
    cause = "rewards are equal within each group" if equal else "all advantages are 0"
    table = config.table(AlgorithmTable)
    hints = ["easier or harder prompts", "a reward with more than one value"]
    hints.append(f"more samples a prompt (algorithm.group_size = {table.group_size})")
    if not table.filters:
        hints.append('dynamic sampling (algorithm.filters = ["zero_variance"])')
    return f"{cause}, mean reward {mean:.3g}; what helps: {', '.join(hints)}"
