"""Supervised fine-tuning."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from relax_rt.roles.training.algorithms.inputs import AdvantageInputs
from relax_rt.roles.training.algorithms.registry import part
from relax_rt.roles.training.algorithms.tensors import Metrics, TokenTensors

if TYPE_CHECKING:
    import torch


@part("loss", "sft", traits={"unjudged"})
def sft(tokens: TokenTensors, options: object) -> tuple[torch.Tensor, Metrics]:
    """-log pi of each token of mask 1: the cross-entropy of the given completion. Advantages play no part.

    Returns:
        The loss [m], not aggregated, and no metrics.
    """
    return -tokens.logprobs, {}


@part("advantage", "none", traits={"no_cost", "unjudged"})
def no_advantage(batch: AdvantageInputs, options: object) -> list[NDArray[np.float32]]:
    """1 on every trained token, for losses that judge none (sft); float32 [T] for each trajectory."""
    return [one.spread(1.0) for one in batch.trajectories]
