"""The table [roles.genrm] of roles.toml, and the model that it names."""

from __future__ import annotations

from pathlib import Path

from relax_rt.config.loader import role_settings
from relax_rt.config.schema import Filled, RunConfig
from relax_rt.roles.models.resolve import resolve_model
from relax_rt.roles.models.settings import ModelTable
from relax_rt.roles.rollout.engines.settings import EngineSettings


class GenrmSettings(EngineSettings):
    """The generative judge: engines that answer what [reward.judge] asks. Its slots are a pool."""

    model: Filled | None = None
    """A model folder or package, as in model.path. Unset: the policy before its first step."""
    follow: bool = False
    """Judge with the policy's newest weights instead of frozen ones."""


def genrm_settings(config: RunConfig) -> GenrmSettings:
    """Return the table [roles.genrm]."""
    return role_settings(config, "genrm", GenrmSettings)


def judge_folder(config: RunConfig, config_dir: Path) -> Path:
    """Return the folder of the judge's model; a package is converted here.

    Raises:
        RelaxError: there is none.
    """
    return resolve_model(genrm_settings(config).model or config.table(ModelTable).path, config_dir)
