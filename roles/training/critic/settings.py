"""The table [roles.critic] of roles.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Seconds
from relax_rt.roles.models.settings import TrainedSettings


class CriticSettings(TrainedSettings):
    """The critic: the policy's layers as they were before its first step, with a value head."""

    hang_after_s: Seconds = 300.0
    learning_rate: Annotated[float, Field(gt=0, lt=1)] = 1e-5
    value_clip: Annotated[float, Field(ge=0)] = 0.2
    """Value clipping: maximum change of a value within a step that the loss follows; 0: none. It bounds the updates of
    a step after the first (algorithm.updates_per_step)."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
