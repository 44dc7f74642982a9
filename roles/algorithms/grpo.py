"""Group relative policy optimisation: advantages from a group's rewards, and the clipped loss.

Sources: group advantages from DeepSeekMath (arXiv 2402.03300, section 4.1); clipping from PPO (arXiv 1707.06347,
equation 7); a higher upper clip from DAPO (arXiv 2503.14476, section 3.1), whose loss per token of the whole batch is
also what the caller gets by dividing the sum once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from relax_rt.roles.algorithms.advantages.group import apply_truncation as apply_truncation
from relax_rt.roles.algorithms.advantages.group import group_advantages as group_advantages

if TYPE_CHECKING:
    import torch


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
