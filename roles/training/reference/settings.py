"""The table [roles.reference] of roles.toml."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from relax_rt.config.schema import Filled
from relax_rt.roles.models.settings import ShardedSettings


class ReferenceSettings(ShardedSettings):
    """The reference policy or teacher, for its log-probabilities. With the torch backend its slots are a pool: each has
    the whole model."""

    model: Filled | None = None
    """A model folder or package, as in model.path, with the policy's vocabulary: the teacher of `distillation`. Unset:
    the policy before its first step."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 32
    """Samples leased at a time."""
