"""Advantages from the rewards of a group: GRPO, Dr. GRPO, RLOO; and what truncated completions count as."""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs
from relax_rt.roles.training.algorithms.registry import part

Truncation = Literal["mask", "zero_reward", "soft_penalty", "none"]
EQUAL = 1e-6
"""Rewards of a group that differ by less are equal: the group says nothing about which member is better."""
EPS = 1e-4
"""Added to standard deviations, so that a nearly constant group does not blow up."""


def group_advantages(
    rewards: NDArray[np.floating], *, normalise_std: bool = True, eps: float = EPS
) -> NDArray[np.float64]:
    """Advantages of one group: (r - mean) / (std + eps), or r - mean.

    Args:
        rewards: [n], any real dtype.
        normalise_std: divide by the group's standard deviation (of n - 1, as the members are a sample of the policy).
        eps: keeps a nearly constant group from blowing up.

    Returns:
        float64 [n]; zeros for a group of one or of equal rewards.
    """
    values = np.asarray(rewards, np.float64)
    if len(values) < 2 or float(np.ptp(values)) < EQUAL:
        return np.zeros(len(values))
    centred: NDArray[np.float64] = values - values.mean()
    return centred / float(values.std(ddof=1) + eps) if normalise_std else centred


def apply_truncation(
    rewards: NDArray[np.float64], truncated: NDArray[np.bool_], policy: Truncation, soft_penalty: float
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """What completions cut at max_new_tokens count as.

    Args:
        rewards, truncated: [n] of one group.
        policy: mask: not trained on and in no group statistic; zero_reward: reward 0; soft_penalty: the penalty is
            subtracted; none: like any other.

    Returns:
        rewards [n], and which members are kept, bool [n].
    """
    kept = np.ones(len(rewards), bool)
    if policy == "mask":
        return rewards, ~truncated
    if policy == "zero_reward":
        return np.where(truncated, 0.0, rewards), kept
    if policy == "soft_penalty":
        return np.where(truncated, rewards - soft_penalty, rewards), kept
    return rewards, kept


class GroupOptions(Table):
    """How a group's rewards are normalised."""

    normalise_std: bool = True
    """Divide by a standard deviation (GRPO); false: only the mean is subtracted (Dr. GRPO)."""
    std_of: Literal["group", "batch"] = "group"
    """Whose standard deviation: the group's, or that of all rewards of the step."""


@part(
    "advantage",
    "grpo",
    options=GroupOptions,
    needs=lambda o: {"rewards", *({"batch"} & {o.std_of})},
    traits={"groups"},
)
def grpo(batch: AdvantageInputs, options: GroupOptions) -> list[NDArray[np.float32]]:
    """A = (r - mean of the group) / (std + 1e-4), equal on all tokens of a sample.

    GRPO: DeepSeekMath (arXiv 2402.03300, section 4.1.2), with the standard deviation of n - 1. Without the division it
    is Dr. GRPO's (arXiv 2503.20783, section 3.2). std_of = "batch": group mean with the batch's standard deviation
    (arXiv 2508.08221, "Lite PPO"; from memory).

    Returns:
        float32 [T] for each trajectory.
    """
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch.trajectories)
    scores = np.array([t.score for t in batch.trajectories], np.float64)
    by_group = options.normalise_std and options.std_of == "group"
    whole = float(scores.std(ddof=1)) + EPS if len(scores) > 1 else 1.0
    for members in batch.groups():
        advantages = group_advantages(scores[members], normalise_std=by_group)
        if options.normalise_std and not by_group:
            advantages = advantages / whole
        for index, advantage in zip(members, advantages, strict=True):
            found[index] = batch.trajectories[index].spread(advantage)
    return found


@part("advantage", "rloo", needs={"rewards"}, traits={"groups"})
def rloo(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """A_i = r_i - mean of the other members' rewards (REINFORCE leave-one-out).

    Ahmadian et al. (arXiv 2402.14740, section 2.3), after Kool et al. 2019. With KL placed in the reward, r is the
    reward less the sequence's KL penalty, as there. A group of one has no baseline, and one of equal rewards nothing to
    tell: their advantages are 0.

    Returns:
        float32 [T] for each trajectory.
    """
    found: list[NDArray[np.float32]] = [np.zeros(0, np.float32)] * len(batch.trajectories)
    for members in batch.groups():
        rewards = np.array([batch.trajectories[i].score for i in members], np.float64)
        # r - mean of the others = (r - mean of all) n / (n - 1)
        scale = len(rewards) / max(1, len(rewards) - 1)
        for index, advantage in zip(members, scale * group_advantages(rewards, normalise_std=False), strict=True):
            found[index] = batch.trajectories[index].spread(advantage)
    return found
