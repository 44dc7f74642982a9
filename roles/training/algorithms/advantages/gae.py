"""Generalised advantage estimation with a critic's values, and the critic's loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages.reinforce import whitened
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats, Trajectory, require
from relax_rt.roles.training.algorithms.registry import part

if TYPE_CHECKING:
    import torch


class GaeOptions(Table):
    """Discounts, and normalisation over the batch."""

    gamma: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Discount of a reward for each trained token that it comes later."""
    lam: Annotated[float, Field(ge=0, le=1)] = 0.95
    """Weight of longer estimates: 0 is the temporal difference, 1 the return less the value."""
    whiten: bool = True
    """Normalise the advantages over all trained tokens of the step."""


def estimate(rewards: Floats, values: Floats, gamma: float, lam: float) -> tuple[Floats, Floats]:
    """Advantages and returns of one finished trajectory.

    delta_t = r_t + gamma V_{t+1} - V_t and A_t = delta_t + gamma lam A_{t+1} with V = A = 0 behind the last token;
    returns are A + V (GAE, arXiv 1506.02438, equation 16; the recursive form as in PPO, arXiv 1707.06347, equation 11).

    Args:
        rewards, values: float64 [n], of the trained tokens alone, as they were sampled: tokens of the environment are
            no steps of the policy. Where an episode goes on in another branch, V_{t+1} is of the state there.

    Returns:
        float64 [n] each.
    """
    advantages = np.zeros(len(rewards))
    carried, following = 0.0, 0.0
    for t in range(len(rewards) - 1, -1, -1):
        carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
        advantages[t], following = carried, values[t]
    return advantages, advantages + values


def token_rewards(one: Trajectory) -> Floats:
    """The reward on the trained token that was sampled last, less what each token costs; float64 [n], as `steps`."""
    rewards = -one.penalty[one.steps]
    if len(rewards):
        rewards[-1] += one.reward
    return rewards


def estimates(batch: AdvantageInputs, options: GaeOptions) -> list[tuple[Floats, Floats]]:
    """Advantages, not normalised, and returns of the trained tokens of each trajectory; what the critic learns from.

    Raises:
        Refused: a sample has no values.
    """
    found = []
    for one in require(batch, "values", "gae"):
        assert one.values is not None
        found.append(estimate(token_rewards(one), one.values[one.steps], options.gamma, options.lam))
    return found


def gae_returns(batch: AdvantageInputs, options: GaeOptions) -> list[NDArray[np.float32]]:
    """What the critic's values should have been: advantages, not normalised, plus values; see `estimate`.

    Returns:
        float32 [T] for each trajectory, 0 where nothing is trained.

    Raises:
        Refused: a sample has no values.
    """
    found = estimates(batch, options)
    return [one.place(returns) for one, (_, returns) in zip(batch.trajectories, found, strict=True)]


@part(
    "advantage",
    "gae",
    options=GaeOptions,
    needs=lambda o: {"rewards", "values", *({"batch"} if o.whiten else ())},
    returns=gae_returns,
)
def gae(batch: AdvantageInputs, options: GaeOptions) -> list[NDArray[np.float32]]:
    """PPO's advantages from a critic's values; see `estimate`. Normalised over the batch as in PPO's implementations
    (arXiv 2005.12729, section 3).

    Returns:
        float32 [T] for each trajectory.

    Raises:
        Refused: a sample has no values.
    """
    values = [advantages for advantages, _ in estimates(batch, options)]
    final = whitened(values) if options.whiten else values
    return [one.place(v) for one, v in zip(batch.trajectories, final, strict=True)]


def value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, mask: torch.Tensor, *, clip: float | None
) -> tuple[torch.Tensor, dict[str, float]]:
    """The critic's loss of each token: max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2.

    Squared error: PPO (arXiv 1707.06347, equation 9); its clipping is of PPO's published implementation, described in
    arXiv 2005.12729, section 3.

    Args:
        values: float [m], under the critic that is trained; gradients flow through it.
        old_values: [m], under the critic that the returns were computed with.
        returns: [m]. mask: [m], 0: counts for nothing, whatever stands in the others.
        clip: how far values may move in one update; None: not clipped.

    Returns:
        The loss [m], 0 under mask 0, not aggregated; and sums over the trained tokens: `clipped` (tokens whose
        gradient the clip stopped), `value`, `return`, `error` (squared), `tokens`.
    """
    import torch

    counted = mask != 0
    values, old_values, returns = (x.masked_fill(~counted, 0.0) for x in (values, old_values, returns))
    error = (values - returns) ** 2
    if clip is None:
        loss, stopped = error, torch.zeros_like(counted)
    else:
        held = (old_values + (values - old_values).clamp(-clip, clip) - returns) ** 2
        loss, stopped = torch.maximum(error, held), held > error
    with torch.no_grad():
        metrics = {
            "clipped": float(stopped.sum()),
            "value": float(values.sum()),
            "return": float(returns.sum()),
            "error": float(error.sum()),
            "tokens": float(counted.sum()),
        }
    return loss / 2, metrics
