"""Entropy of the policy as a term of the loss: with a fixed coefficient, or one that holds it above a target."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.registry import part


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
        The coefficient that counts in the next update, and the one to go on from.
    """
    return options.coefficient, options.coefficient


@part("entropy", "adaptive", options=AdaptiveOptions, needs={"entropy"}, first=lambda options: options.first)
def adaptive(coefficient: float, entropy: float, options: AdaptiveOptions) -> tuple[float, float]:
    """Adaptive entropy control (Skywork-OR1, arXiv 2505.22312, section 4; from memory): the coefficient rises by a step
    while the entropy is below the target and falls by one above it, never below 0, and counts only while the entropy is
    at most the target.

    Args:
        coefficient: the one to go on from. entropy: mean of the last update, nats a token.

    Returns:
        The coefficient that counts in the next update, and the one to go on from.
    """
    moved = coefficient + options.step if entropy < options.target else coefficient - options.step
    moved = min(max(moved, 0.0), options.most)
    return (moved if entropy <= options.target else 0.0), moved
