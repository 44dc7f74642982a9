"""On-policy distillation: the policy's own samples, judged token by token by a teacher."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from relax_rt.config.schema import Table
from relax_rt.roles.training.algorithms.inputs import AdvantageInputs, require
from relax_rt.roles.training.algorithms.registry import part


class DistillationOptions(Table):
    """How the teacher's judgement counts."""

    coefficient: Annotated[float, Field(gt=0)] = 1.0
    """Factor of the advantages."""
    limit: Annotated[float, Field(gt=0)] | None = None
    """Hold each token's difference of log-probabilities within this bound, nats."""


@part("advantage", "distillation", options=DistillationOptions, needs={"reference"}, traits={"no_cost", "policy"})
def distillation(batch: AdvantageInputs, options: DistillationOptions) -> list[NDArray[np.float32]]:
    """A_t = coefficient (log p_teacher(token) - log p_policy(token)): minus the one-sample reverse KL of each token.

    Thinking Machines Lab, "On-Policy Distillation" (2025), with no discount into the future, as there; the objective is
    MiniLLM's (arXiv 2306.08543) and GKD's (arXiv 2306.13649) on-policy reverse KL, taken token by token. The teacher's
    log-probabilities are the reference's column, the policy's those of the weights before the step's first update: with
    what was sampled from in their place, and the samples weighted to be the policy's (tis), the gradient would be that
    of -KL(policy || teacher) + KL(policy || behaviour).

    Returns:
        float32 [T] for each trajectory.

    Raises:
        Refused: a sample has no reference or proximal log-probabilities.
    """
    found = []
    for one in require(batch, "reference", "distillation"):
        assert one.reference is not None
        gap = (one.reference - one.current)[one.steps]
        if options.limit is not None:
            gap = gap.clip(-options.limit, options.limit)
        found.append(one.place(options.coefficient * gap))
    return found
