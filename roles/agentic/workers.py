"""Which worker processes an env slot has."""

from __future__ import annotations

from relax_rt.roles.agentic.frames import Spec
from relax_rt.roles.agentic.loading import Factory
from relax_rt.roles.agentic.loop_pool import LoopPool
from relax_rt.roles.agentic.pool import Pool, limits_of
from relax_rt.roles.agentic.settings import EnvSettings


def open_pool(settings: EnvSettings, factory: Factory, config_dir: str, size: int | None = None) -> Pool | None:
    """A pool that is to be entered; None: episodes are played in the slot's own process.

    Args:
        size: of the pool, if not as the settings have it.
    """
    workers = int(factory.blocking) if settings.workers is None else settings.workers
    if not workers:
        return None
    spec = Spec(settings.environment, settings.options, config_dir)
    timeout_s, limits = settings.turn_timeout_s, limits_of(settings)
    if factory.blocking:
        return Pool(spec, size or workers, timeout_s, limits)
    plays_s = settings.episode_timeout_s if factory.plays else None
    return LoopPool(spec, size or workers, timeout_s, limits, plays_s=plays_s)
