"""Inference engines behind one narrow interface (`base`)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.rollout.engines.base import Engine
    from relax_rt.roles.rollout.engines.settings import EngineSettings


def make_engine(ctx: RoleContext, folder: Path, settings: EngineSettings) -> Engine:
    """The engine that `settings.engine` names, with the model of `folder`; blocks while a model is loaded here."""
    if settings.engine == "sglang":
        from relax_rt.roles.rollout.engines.sglang import make

        return make(ctx, folder, settings)
    import torch

    from relax_rt.roles.models.device import warn_if_slow
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine
    from relax_rt.roles.rollout.engines.settings import RolloutSettings

    # A slot that was given no device must not touch one.
    device = "cuda" if settings.gpus and torch.cuda.is_available() else "cpu"
    warn_if_slow(ctx, device, settings.dtype)
    return EmbeddedEngine(
        folder,
        dtype=settings.dtype,
        max_sequences=settings.max_sequences,
        threads=settings.threads,
        device=device,
        routing=isinstance(settings, RolloutSettings) and settings.routing,
    )
