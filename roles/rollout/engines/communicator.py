"""Over what broadcasts of weights go, by what trainer and rollouts have."""

from __future__ import annotations

from relax_rt.config.schema import RunConfig
from relax_rt.roles.rollout.engines.settings import RolloutSettings
from relax_rt.roles.training.backend.settings import TrainerSettings
from relax_rt.roles.training.publication.settings import Communicator, PublicationTable


def communicator_of(config: RunConfig) -> Communicator:
    """Over what broadcasts go: as the config says, or NCCL where trainer and rollouts have GPUs."""
    named = config.table(PublicationTable).communicator
    if named != "auto":
        return named
    return "gloo" if without_gpu(config) else "nccl"


def without_gpu(config: RunConfig) -> list[str]:
    """Trainer and rollouts, as far as they have no GPU."""
    tables = {
        kind: table for kind, table in config.roles.items() if isinstance(table, TrainerSettings | RolloutSettings)
    }
    return [kind for kind, table in tables.items() if not table.gpus] if tables else ["trainer"]
