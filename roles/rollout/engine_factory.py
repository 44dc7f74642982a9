"""Makes the engine of a role by its table: in the role's process, or an SGLang server that it supervises.

Called by every role with an engine: rollout, evaluator, judge.
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
from pathlib import Path

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.rollout.engines.base import Engine
from relax_rt.roles.rollout.engines.settings import EngineSettings, RolloutSettings, longest_tokens
from relax_rt.roles.rollout.engines.sglang.options import (
    RESERVED_POSITIONS,
    device_of,
    interpreter,
    server_environment,
    server_options,
)
from relax_rt.roles.training.algorithms.settings import SHARING, AlgorithmTable
from relax_rt.supervision.rundir import slot_file

MIN_KV_TOKENS = 4096


def make_engine(ctx: RoleContext, folder: Path, settings: EngineSettings) -> Engine:
    """Return the engine that `settings.engine` names, with the model of `folder`. Blocks while a model is loaded
    here."""
    return _sglang(ctx, folder, settings) if settings.engine == "sglang" else _embedded(ctx, folder, settings)


def _embedded(ctx: RoleContext, folder: Path, settings: EngineSettings) -> Engine:
    # torch is not imported by the agent and the quick checks, which import this module.
    import torch

    from relax_rt.roles.models.device import warn_if_slow
    from relax_rt.roles.rollout.engines.embedded import EmbeddedEngine

    # A slot without a device must not use one.
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


def _sglang(ctx: RoleContext, model: Path, settings: EngineSettings) -> Engine:
    """Return an engine whose server is not started yet."""
    from relax_rt.roles.rollout.engines.sglang.engine import SglangEngine
    from relax_rt.roles.rollout.engines.sglang.server import ServerSpec

    device = device_of(settings.sglang.device)
    name = slot_file(ctx.who.slot, ".sglang")
    for left in ctx.shm_dir.glob(f"{name}.*"):
        # Left by an earlier incarnation that was killed together with its server.
        shutil.rmtree(left, ignore_errors=True)
    folder = ctx.shm_dir / f"{name}.{ctx.who.epoch}"
    spec = ServerSpec(
        python=interpreter(settings.sglang.python, Path(ctx.config.config_dir), sys.executable),
        folder=folder / "tmp",
        log=ctx.run_dir / "logs" / f"{name}.log",
        environment=server_environment(device, settings.threads, folder / "tmp", os.environ),
    )
    kv_tokens = max(MIN_KV_TOKENS, settings.max_sequences * (longest_tokens(ctx.config) + RESERVED_POSITIONS))
    shares = ctx.config.table(AlgorithmTable).mode in SHARING
    options = functools.partial(server_options, settings, device, kv_tokens=kv_tokens, shares=shares)

    def on_file_fallback(version: int, why: str) -> None:
        ctx.event("handles_fallback", version=version, why=why)
        ctx.log.warning("weights reach the SGLang server by the file", version=version, why=why)

    return SglangEngine(
        model,
        settings,
        spec,
        options,
        device=device,
        weights_folder=folder / "weights",
        kv_tokens=kv_tokens,
        on_boot=lambda seconds: ctx.progress.extend(seconds, "starting its SGLang server"),
        on_progress=lambda progress: ctx.progress.advance(0, progress),
        attempt=ctx.shm_dir / slot_file(ctx.who.slot, ".handles"),
        on_file_fallback=on_file_fallback,
    )
