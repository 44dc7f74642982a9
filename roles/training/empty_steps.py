"""Why a step trained nothing, and what helps: for the trainer's records and for the end of a run."""

from __future__ import annotations

from collections.abc import Sequence

from relax_rt.config.schema import RunConfig
from relax_rt.roles.base.sample import Sample
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.training.algorithms.settings import AlgorithmTable


def no_token(config: RunConfig, samples: Sequence[Sample]) -> str:
    """Say why a step without a token to train trained nothing, and what helps."""
    cut = sum(sample.meta.truncated for sample in samples)
    limit, truncated = config.table(SamplingTable).max_new_tokens, config.table(AlgorithmTable).truncated
    return (
        f"none of {len(samples)} samples has a token to train; {cut} were cut at sampling.max_new_tokens = {limit}"
        f' (algorithm.truncated = "{truncated}")'
    )


def no_advantage(config: RunConfig, samples: Sequence[Sample], left_out_tokens: int) -> str:
    """Say why the advantages of a step are all 0, and what helps.

    Args:
        left_out_tokens: tokens whose advantage the loss set to 0 before the update.
    """
    if left_out_tokens:
        hint = "a lower algorithm.max_staleness, or a wider trust region in algorithm.loss"
        return f"the loss set the advantages of all {left_out_tokens} tokens that had one to 0; what helps: {hint}"
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
