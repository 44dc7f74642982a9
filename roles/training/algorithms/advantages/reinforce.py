"""REINFORCE++ and its form with a baseline: advantages normalised over the whole batch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages.group import group_advantages
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, Floats
from relax_rt.roles.training.algorithms.registry import part

EPS = 1e-8


class WhitenOptions(Table):
    """Normalisation over the batch."""

    whiten: bool = True
    """Subtract the mean over all trained tokens of the step and divide by their standard deviation."""


def whitened(values: list[Floats]) -> list[Floats]:
    """(x - mean) / (std + 1e-8) over all entries of all arrays together; zeros if there are none that differ."""
    whole = np.concatenate(values) if values else np.zeros(0)
    # Of equal ones the mean may be off by a rounding, which the standard deviation would not take out.
    if len(whole) < 2 or not float(np.ptp(whole)):
        return [np.zeros(len(v)) for v in values]
    mean, std = float(whole.mean()), float(whole.std())
    return [(v - mean) / (std + EPS) for v in values]


def to_go(values: Floats) -> Floats:
    """Sums of each entry and all after it, [n]."""
    return np.cumsum(values[::-1])[::-1]


def _spread(batch: AdvantageInputs, values: list[Floats], whiten: bool) -> list[NDArray[np.float32]]:
    final = whitened(values) if whiten else values
    return [one.place(v) for one, v in zip(batch.trajectories, final, strict=True)]


def _needs(options: WhitenOptions) -> set[str]:
    return {"rewards", "batch"} if options.whiten else {"rewards"}


@part("advantage", "reinforce_pp", options=WhitenOptions, needs=_needs)
def reinforce_pp(batch: AdvantageInputs, options: WhitenOptions) -> list[NDArray[np.float32]]:
    """A_t = r - sum of the KL penalties of token t and all after it; then normalised over all tokens of the batch.

    REINFORCE++ (arXiv 2501.03262, section 3: global advantage normalisation; k1 KL in the reward, which is
    `kl = { name = "k1", place = "reward", … }` here).

    Returns:
        float32 [T] for each trajectory.
    """
    values = [t.reward - to_go(t.penalty[t.steps]) for t in batch.trajectories]
    return _spread(batch, values, options.whiten)


@part("advantage", "reinforce_pp_baseline", options=WhitenOptions, needs=_needs, traits={"groups"})
def reinforce_pp_baseline(batch: AdvantageInputs, options: WhitenOptions) -> list[NDArray[np.float32]]:
    """A = r - mean of the group, 0 in one of equal rewards; then normalised over all tokens of the batch.

    REINFORCE++ with baseline (arXiv 2501.03262, section 3; there with k2 as the KL loss).

    Returns:
        float32 [T] for each trajectory.
    """
    values: list[Floats] = [np.zeros(0)] * len(batch.trajectories)
    for members in batch.groups():
        scores = np.array([batch.trajectories[i].score for i in members], np.float64)
        for index, advantage in zip(members, group_advantages(scores, normalise_std=False), strict=True):
            values[index] = np.full(int(batch.trajectories[index].mask.sum()), advantage)
    return _spread(batch, values, options.whiten)
