"""A real SGLang server as an engine: a supervised child of the role, talked to over HTTP."""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.roles.base.episodes import episode_tokens
from relax_rt.roles.data.settings import DataTable
from relax_rt.roles.rollout.engines.settings import SamplingTable
from relax_rt.roles.rollout.engines.sglang.options import (
    KEPT_BACK,
    device_of,
    interpreter,
    server_environment,
    server_options,
)
from relax_rt.roles.training.algorithms.settings import AlgorithmTable

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.roles.rollout.engines.settings import EngineSettings
    from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine

MIN_KV_TOKENS = 4096


def make(ctx: RoleContext, model: Path, settings: EngineSettings) -> SglangEngine:
    """The engine of a role, not started yet."""
    from relax_rt.config.schema import RunConfig
    from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
    from relax_rt.roles.rollout.engines.sglang.server import Place
    from relax_rt.roles.training.algorithms.settings import SHARING
    from relax_rt.supervision.rundir import slot_file

    config = ctx.config
    assert isinstance(config, RunConfig)
    device = device_of(settings.sglang.device)
    name = slot_file(ctx.who.slot, ".sglang")
    for left in ctx.shm_dir.glob(f"{name}.*"):
        # Of an earlier incarnation that was killed, and whose server with it.
        shutil.rmtree(left, ignore_errors=True)
    folder = ctx.shm_dir / f"{name}.{ctx.who.epoch}"
    place = Place(
        python=interpreter(settings.sglang.python, Path(ctx.config.config_dir), sys.executable),
        folder=folder / "tmp",
        log=ctx.run_dir / "logs" / f"{name}.log",
        environment=server_environment(device, settings.threads, folder / "tmp", os.environ),
    )
    prompted = config.table(DataTable).max_prompt_tokens + config.table(SamplingTable).max_new_tokens
    longest = episode_tokens(config) or prompted
    kv_tokens = max(MIN_KV_TOKENS, settings.max_sequences * (longest + KEPT_BACK))
    shares = config.table(AlgorithmTable).mode in SHARING
    options = functools.partial(server_options, settings, device, kv_tokens=kv_tokens, shares=shares)

    def not_shown(version: int, why: str) -> None:
        ctx.event("handles_fallback", version=version, why=why)
        ctx.log.warning("weights reach the SGLang server by the file", version=version, why=why)

    return SglangEngine(
        model,
        settings,
        place,
        options,
        device=device,
        weights_folder=folder / "weights",
        kv_tokens=kv_tokens,
        booting=lambda seconds: ctx.progress.extend(seconds, "starting its SGLang server"),
        tell=lambda how_far: ctx.progress.advance(0, how_far),
        attempt=ctx.shm_dir / slot_file(ctx.who.slot, ".handles"),
        not_shown=not_shown,
    )
