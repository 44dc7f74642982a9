"""Whether trainer and embedded engine compute the run's model, as far as its config says; no weight is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from relax_rt.config.problems import Problem
from relax_rt.config.schema import RunConfig
from relax_rt.roles.rollout.engines.settings import EngineSettings
from relax_rt.roles.training.backend.settings import TrainerSettings


def check_computed(config: RunConfig, folder: Path) -> Iterator[Problem]:
    """What of the model in this folder is not computed, where an own backend computes it."""
    engines = [table for table in config.roles.values() if isinstance(table, EngineSettings)]
    trainer = config.roles.get("trainer")
    own = any(table.engine == "embedded" for table in engines)
    own |= isinstance(trainer, TrainerSettings) and trainer.backend == "torch"
    if not own:
        return
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    from relax_rt.roles.models.forward import OTHER_MODELS, not_computed
    from relax_rt.roles.training.batch.attention import UNLIKE

    try:
        text = AutoConfig.from_pretrained(folder).get_text_config()
    except (*UNLIKE, OSError, StrictDataclassError):
        # A config that cannot be read is refused, with its reason, by what loads the model.
        return
    if why := not_computed(text):
        yield Problem(("model", "path"), f"the model in {folder} cannot be computed: {why}", OTHER_MODELS)
