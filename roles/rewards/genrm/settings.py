"""The table [roles.genrm] of roles.toml."""

from __future__ import annotations

from relax_rt.config.schema import Filled
from relax_rt.roles.rollout.engines.settings import EngineSettings


class GenrmSettings(EngineSettings):
    """The generative judge: engines that answer what [reward.judge] asks. Its slots are a pool."""

    model: Filled | None = None
    """A model folder or package, as in model.path. Unset: the policy before its first step."""
    follow: bool = False
    """Judge with the policy's newest weights instead of frozen ones."""
