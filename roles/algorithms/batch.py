"""From rewards to per-token advantages, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from relax_rt.roles.algorithms.grpo import apply_truncation, group_advantages
from relax_rt.roles.sample import Sample
from relax_rt.roles.sections import AlgorithmTable
from relax_rt.transport.errors import Refused


def set_advantages(samples: Sequence[Sample], algorithm: AlgorithmTable) -> None:
    """Give each sample its advantages, float32 [T], equal on its sampled tokens and 0 elsewhere.

    The truncation policy is applied first; a sample that it masks counts in no group statistic and is not trained on.

    Raises:
        Refused: a sample has no reward.
    """
    groups: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples:
        if sample.reward is None:
            raise Refused(f"sample {sample.meta.group}.{sample.meta.member}", why="it has no reward")
        groups[sample.meta.group].append(sample)
    for members in groups.values():
        rewards = np.array([m.reward for m in members], np.float64)
        truncated = np.array([m.meta.truncated for m in members], bool)
        rewards, kept = apply_truncation(rewards, truncated, algorithm.truncated, algorithm.soft_penalty)
        advantages = np.zeros(len(members))
        if kept.sum() > 1:
            advantages[kept] = group_advantages(rewards[kept], normalise_std=algorithm.normalise_std)
        for member, advantage, keep in zip(members, advantages, kept, strict=True):
            member.advantages = (member.loss_mask * advantage).astype(np.float32)
            if not keep:
                member.loss_mask = np.zeros_like(member.loss_mask)
