"""Terms beside the policy's loss: KL to a reference policy, and an entropy bonus.

KL(policy || reference) is estimated from the sampled tokens, as a term of the loss or as a cost in the reward. With
d = log pi - log pi_reference: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d (Schulman 2020, "Approximating KL
Divergence"). As terms of a loss their gradients are not those of the KL: k1's is zero in expectation; k2's is the
reverse KL's on-policy; k3's is that of the forward KL (arXiv 2510.01555). `unbiased` weights k3 by the importance ratio
and lets the gradient through it, which is right in value and gradient, off-policy too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import numpy as np
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import LOG_RATIO_LIMIT, Floats, TokenTensors, log_ratio
from relax_rt.roles.training.algorithms.registry import part

if TYPE_CHECKING:
    import torch


class KlOptions(Table):
    """Weight and place."""

    coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Factor of the estimate, nats a token."""
    place: Literal["loss", "reward"] = "loss"
    """loss: a term beside the policy's loss; reward: a cost of each token in the reward, without gradient."""


class UnbiasedOptions(Table):
    """Weight, and the policy of the importance ratio."""

    coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Factor of the estimate, nats a token."""
    ratio_to: Literal["behaviour", "proximal"] = "behaviour"
    """The policy that the samples are taken to be of."""


def _gap(tokens: TokenTensors) -> torch.Tensor:
    if tokens.reference is None:
        raise ValueError("reference log-probabilities are needed and were not computed")
    return log_ratio(tokens.logprobs, tokens.reference)


def _held(gap: Floats) -> Floats:
    """d within the bounds that it has in the loss."""
    return np.clip(gap, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


@part("kl", "k1", options=KlOptions, needs={"reference"}, traits={"no_gradient"}, cost=lambda gap, _: _held(gap))
def k1(tokens: TokenTensors, options: KlOptions) -> torch.Tensor:
    """d, for each token; [m]. Unbiased in value; its place is the reward."""
    return _gap(tokens)


@part("kl", "k2", options=KlOptions, needs={"reference"}, cost=lambda gap, _: _held(gap) ** 2 / 2)
def k2(tokens: TokenTensors, options: KlOptions) -> torch.Tensor:
    """d^2 / 2, for each token; [m]."""
    return _gap(tokens) ** 2 / 2


@part("kl", "k3", options=KlOptions, needs={"reference"}, cost=lambda gap, _: np.exp(-_held(gap)) - 1 + _held(gap))
def k3(tokens: TokenTensors, options: KlOptions) -> torch.Tensor:
    """exp(-d) - 1 + d, for each token; [m]. GRPO's (arXiv 2402.03300, equation 4)."""
    gap = _gap(tokens)
    return (-gap).exp() - 1.0 + gap


@part(
    "kl",
    "unbiased",
    options=UnbiasedOptions,
    needs=lambda o: {"reference", *({"proximal"} & {o.ratio_to})},
)
def unbiased(tokens: TokenTensors, options: UnbiasedOptions) -> torch.Tensor:
    """(pi / pi_old) k3, for each token, with the gradient through both factors; [m].

    DeepSeek-V3.2 (arXiv 2512.02556, section 3.1; from memory).
    """
    gap = _gap(tokens)
    return log_ratio(tokens.logprobs, tokens.old(options.ratio_to)).exp() * ((-gap).exp() - 1.0 + gap)


class BonusOptions(Table):
    """A fixed bonus."""

    coefficient: Annotated[float, Field(gt=0)] = 0.001
    """Factor of the entropy, nats a token."""


class AdaptiveOptions(Table):
    """A bonus that is given while the entropy is below a target."""

    target: Annotated[float, Field(gt=0)] = 0.2
    """Entropy to hold, nats a token."""
    step: Annotated[float, Field(gt=0)] = 0.0005
    """What the coefficient changes by in an update."""
    most: Annotated[float, Field(gt=0)] = 0.05
    """Largest coefficient."""
    first: Annotated[float, Field(ge=0)] = 0.0
    """Coefficient of the first update."""


@part("entropy", "bonus", options=BonusOptions, needs={"entropy"}, first=lambda options: options.coefficient)
def bonus(coefficient: float, entropy: float, options: BonusOptions) -> tuple[float, float]:
    """The fixed coefficient. The bonus is that of A3C (arXiv 1602.01783, section 4), as in PPO (arXiv 1707.06347,
    equation 9).

    Returns:
        The coefficient that counts in the next update, and the one carried on.
    """
    return options.coefficient, options.coefficient


@part("entropy", "adaptive", options=AdaptiveOptions, needs={"entropy"}, first=lambda options: options.first)
def adaptive(coefficient: float, entropy: float, options: AdaptiveOptions) -> tuple[float, float]:
    """Adaptive entropy control (Skywork-OR1, arXiv 2505.22312, section 4; from memory): the coefficient rises by a step
    while the entropy is below the target and falls by one above it, never below 0, and counts only while the entropy is
    at most the target.

    Args:
        coefficient: the one carried on. entropy: mean of the last update, nats a token.

    Returns:
        The coefficient that counts in the next update, and the one carried on.
    """
    moved = coefficient + options.step if entropy < options.target else coefficient - options.step
    moved = min(max(moved, 0.0), options.most)
    return (moved if entropy <= options.target else 0.0), moved
