"""The negative control of tools/bench/convergence.py: samples as old as the bound allows, and nothing done about it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from relax_rt.roles.trainer import TrainerRole

if TYPE_CHECKING:
    from relax_rt.roles.sample import Sample
    from relax_rt.roles.trainers.base import StepResult

PACE_S = 0.5
"""A step takes at least so long: engines are ahead of it as far as the bound lets them."""


class UncorrectedTrainer(TrainerRole):
    """Takes each sample for one of its own weights: the ratio to the behaviour policy is 1, nothing is clipped."""

    def _load(self) -> None:
        from relax_rt.roles.trainers import torch_backend

        loss = torch_backend.clipped_policy_loss

        def uncorrected(logprobs: Any, _behaviour: Any, *rest: Any, **options: Any) -> Any:
            return loss(logprobs, logprobs.detach(), *rest, **options)

        torch_backend.clipped_policy_loss = uncorrected
        super()._load()

    def _train(self, samples: list[Sample]) -> StepResult:
        began = time.monotonic()
        result = super()._train(samples)
        time.sleep(max(0.0, PACE_S - (time.monotonic() - began)))
        return result
