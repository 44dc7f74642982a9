"""The negative control of tools/bench/convergence.py: samples as old as the bound allows, and nothing done about it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from relax_rt.roles.training.trainer import TrainerRole

if TYPE_CHECKING:
    from relax_rt.roles.training.backend.interface import StepResult
    from relax_rt.roles.training.step import StepBatch

PACE_S = 0.5
"""A step takes at least so long: engines are ahead of it as far as the bound lets them."""


class UncorrectedTrainer(TrainerRole):
    """Takes each sample for one of its own weights: the ratio to the behaviour policy is 1, nothing is clipped."""

    def _load(self) -> None:
        from relax_rt.roles.training.algorithms.objective import Objective

        # Without a ratio, the gradient is that of samples of the trained weights.
        table = self.config.algorithm.model_copy(update={"loss": "policy_gradient", "corrections": []})
        self.objective = Objective.of(table, longest=self.config.sampling.max_new_tokens)
        super()._load()

    def _train(self, batch: StepBatch) -> StepResult:
        began = time.monotonic()
        result = super()._train(batch)
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
        return result
