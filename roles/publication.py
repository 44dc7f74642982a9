"""Weights from the trainer to the engines: who stages, who commits, who fetches when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

from relax_rt.role import RoleContext
from relax_rt.roles.engines.base import Engine, KvPolicy
from relax_rt.transport.errors import DeadlineExceeded, Gone, Unreachable
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.source import StageSource

WATCH_S = 20.0
RETRY_S = 0.2


def stage_folder(ctx: RoleContext) -> Path:
    """Where this node's weight stage lies."""
    return ctx.shm_dir / "weights"


async def committed_versions(ctx: RoleContext) -> AsyncIterator[VersionRecord]:
    """Each newly committed version, the newest only; waits (visibly) for the first. Ends when the role stops.

    A registry that is away is waited for: engines go on with what they have.
    """
    revision, seen = 0, 0
    while not ctx.stopping.is_set():
        try:
            changes = await ctx.registry.watch(revision, WATCH_S)
        except (Unreachable, DeadlineExceeded) as error:
            ctx.log.warning("the registry is away; keeping the current weights", error=str(error))
            await asyncio.sleep(RETRY_S)
            continue
        revision = changes.revision
        if changes.committed is not None and changes.committed.version > seen:
            seen = changes.committed.version
            yield changes.committed


class WeightFollower:
    """Keeps an engine at committed versions: fetch and verify in the background, swap at a token boundary.

    The engine serves nothing before the first version is whole on it.
    """

    def __init__(self, ctx: RoleContext, engine: Engine, kv: KvPolicy = "keep") -> None:
        self._ctx, self._engine, self._kv = ctx, engine, kv
        self.record = VersionRecord(0, 0, 0)

    async def follow(self, record: VersionRecord) -> bool:
        """Bring the engine to `record`. False when a newer version took its place before it was whole."""
        try:
            await self._engine.prepare(await asyncio.to_thread(StageSource, stage_folder(self._ctx), record))
        except Gone as error:
            # Retired between commit and fetch: the next committed version is on its way.
            self._ctx.event("weights_skipped", version=record.version, why=str(error))
            await asyncio.sleep(RETRY_S)
            return False
        swap = await self._engine.commit(record, self._kv)
        self.record = record
        self._ctx.event("weights_swapped", version=record.version, step=record.step, pause_s=round(swap.pause_s, 4))
        self._ctx.log.info("weights swapped", version=record.version, step=record.step)
        await self._ctx.ready(record.version)
        return True


class EngineFailure:
    """Carries a failure of the engine to the role, which ends with it."""

    def __init__(self) -> None:
        self._future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def __call__(self, error: BaseException) -> None:
        """Called on the event loop."""
        if not self._future.done():
            self._future.set_exception(error)

    async def wait(self) -> None:
        """Raises what ended the engine; never returns otherwise."""
        await asyncio.shield(self._future)
