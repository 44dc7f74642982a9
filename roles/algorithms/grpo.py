"""Group relative policy optimisation: advantages from a group's rewards, and the clipped loss.

Sources: group advantages from DeepSeekMath (arXiv 2402.03300, section 4.1); clipping from PPO (arXiv 1707.06347,
equation 7); a higher upper clip from DAPO (arXiv 2503.14476, section 3.1), whose loss per token of the whole batch is
also what the caller gets by dividing the sum once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

Truncation = Literal["mask", "zero_reward", "soft_penalty", "none"]
EQUAL = 1e-6
"""Rewards of a group that differ by less are equal: the group says nothing about which member is better."""


def group_advantages(
    rewards: NDArray[np.floating], *, normalise_std: bool = True, eps: float = 1e-4
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


def clipped_policy_loss(
    logprobs: torch.Tensor,
    behaviour_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[torch.Tensor, dict[str, float]]:
    """-min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), summed over tokens, not normalised.

    The caller divides once by the token count of the whole batch, so that the result does not depend on how the batch
    was cut into micro-batches.

    Args:
        logprobs: float [...], under the weights that are trained; gradients flow through it.
        behaviour_logprobs: same shape, under the distribution that was sampled from.
        advantages, mask: same shape; tokens of mask 0 count for nothing, whatever stands in the other tensors.

    Returns:
        The sum, a scalar, and metrics over the tokens of mask 1: `ratio_sum`, `clipped_sum` (tokens whose gradient the
        clip stopped), `kl_sum` (k3 estimate of KL(behaviour || trained), nats), `tokens`, `ratio_max_deviation`.
    """
    import torch

    counted = mask != 0
    # Values under mask 0 may be anything, also inf - inf, and 0 * nan is nan: they are taken out, not multiplied away.
    gap = (logprobs - behaviour_logprobs).masked_fill(~counted, 0.0)
    ratio = gap.exp()
    advantage = advantages.masked_fill(~counted, 0.0)
    clipped = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantage, clipped * advantage).sum()
    with torch.no_grad():
        stopped = clipped * advantage < ratio * advantage
        kl = (ratio - 1.0 - gap).sum()
        deviation = (ratio - 1.0).abs().max() if ratio.numel() else torch.zeros(())
        metrics = {
            "ratio_sum": float(ratio[counted].sum()),
            "clipped_sum": float(stopped.sum()),
            "kl_sum": float(kl),
            "tokens": float(counted.sum()),
            "ratio_max_deviation": float(deviation),
        }
    return loss, metrics
