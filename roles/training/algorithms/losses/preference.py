"""Learning from pairs: direct preference optimisation."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.advantages.group import EQUAL
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors

if TYPE_CHECKING:
    import torch


class DpoOptions(Table):
    """The preference loss."""

    beta: Annotated[float, Field(gt=0)] = 0.1
    """How strongly the policy is held to the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Probability that a preference is the wrong way round (conservative DPO)."""


@part("advantage", "preference", needs={"rewards"}, traits={"no_cost", "groups"})
def preference(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """+1 on the tokens of each group's sample of the highest reward, -1 on those of the lowest, 0 on all others; of
    equal ones the first. A group of equal rewards has no pair.

    Online preferences as in arXiv 2402.04792 (from memory), with the reward as the judge. A data set of pairs comes as
    groups of two with rewards 1 and 0.

    Returns:
        float32 [T] for each trajectory.
    """
    found = [one.spread(0.0) for one in batch.trajectories]
    for members in batch.groups():
        rewards = np.array([batch.trajectories[i].reward for i in members])
        if float(np.ptp(rewards)) >= EQUAL:
            for place, sign in ((int(rewards.argmax()), 1.0), (int(rewards.argmin()), -1.0)):
                found[members[place]] = batch.trajectories[members[place]].spread(sign)
    return found


@part("loss", "dpo", options=DpoOptions, needs={"reference", "pairs"}, traits={"by_advantage"})
def dpo(tokens: TokenTensors, options: DpoOptions) -> tuple[torch.Tensor, Metrics]:
    """-log sigmoid(beta (h_chosen - h_rejected)) of each pair, h the sequence's log pi / pi_reference.

    DPO (arXiv 2305.18290, equation 7); label smoothing is conservative DPO's (Mitchell 2023, from memory). The pair is
    the samples of a group whose advantages are positive and negative.

    Returns:
        [m]: the pair's loss, dealt out evenly over its tokens, so that their plain sum is the sum over pairs; and
        `pairs`, `preferred` (pairs whose chosen sample has the larger h), `margin` (sum of beta (h_c - h_r)).

    Raises:
        ValueError: groups or reference log-probabilities are lacking.
    """
    import torch.nn.functional as functional

    if tokens.group is None or tokens.reference is None:
        raise ValueError("dpo needs the group of each token and reference log-probabilities")
    sign = tokens.advantages.sign()
    groups = int(tokens.group.max()) + 1 if tokens.group.numel() else 0
    zeros = tokens.logprobs.new_zeros(groups)
    margin = options.beta * zeros.index_add(0, tokens.group, sign * (tokens.logprobs - tokens.reference))
    size = zeros.index_add(0, tokens.group, sign.abs())
    smoothing = options.label_smoothing
    loss = -(1 - smoothing) * functional.logsigmoid(margin) - smoothing * functional.logsigmoid(-margin)
    real = size > 0
    metrics = {
        "pairs": float(real.sum()),
        "preferred": float((real & (margin > 0)).sum()),
        "margin": float(margin.detach().sum()),
    }
    return (loss / size.clamp(min=1))[tokens.group] * sign.abs(), metrics
