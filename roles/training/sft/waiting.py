"""What other roles do while the trainer is at the run's cold start."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.training.sft.kept import finished
from relax_rt.roles.training.sft.settings import ColdStartTable
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

WHY = "the trainer's cold start"
POLL_S = 0.5


async def wait_for_weights(ctx: RoleContext) -> None:
    """Say, in a run with a cold start that has no weights yet, that there is nothing to do until then.

    The role counts as started with it: the cold start may take longer than a start may. What waits for the weights
    themselves goes on waiting.
    """
    if not ctx.config.table(ColdStartTable).wanted:
        return
    with suppress(Unreachable, DeadlineExceeded):
        if await ctx.registry.versions():
            return
    ctx.progress.waiting(WHY)
    await ctx.ready()


async def weights_after(ctx: RoleContext) -> Path | None:
    """The weights that RL begins with, once they are there; None: the role was asked to stop before."""
    while (folder := finished(ctx.run_dir)) is None:
        ctx.progress.waiting(WHY)
        if not ctx.stopping.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await ctx.stopping.wait()
        if ctx.stopping.is_set():
            return None
    ctx.progress.waiting("")
    return folder
