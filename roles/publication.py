"""Weights from the trainer to the engines: who stages, who commits, who fetches when."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from relax_rt.role import RoleContext
from relax_rt.roles.engines.embedded import EmbeddedEngine
from relax_rt.transport.errors import Corrupt, DeadlineExceeded, Gone, Unreachable
from relax_rt.transport.versions import VersionRecord
from relax_rt.transport.weights.stage import fetch, read_manifest

WATCH_S = 20.0
RETRY_S = 0.2
SWAP_TIMEOUT_S = 60.0


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

    def __init__(self, ctx: RoleContext, engine: EmbeddedEngine) -> None:
        self._ctx, self._engine = ctx, engine
        self.record = VersionRecord(0, 0, 0)

    async def follow(self, record: VersionRecord) -> bool:
        """Bring the engine to `record`. False when a newer version took its place before it was whole."""
        try:
            await asyncio.to_thread(self._fetch, record)
        except Gone as error:
            # Retired between commit and fetch: the next committed version is on its way.
            self._ctx.event("weights_skipped", version=record.version, why=str(error))
            await asyncio.sleep(RETRY_S)
            return False
        done = asyncio.Event()
        loop = asyncio.get_running_loop()
        self._engine.swap(record.version, lambda: loop.call_soon_threadsafe(done.set))
        await asyncio.wait_for(done.wait(), SWAP_TIMEOUT_S)
        self.record = record
        self._ctx.event("weights_swapped", version=record.version, step=record.step)
        self._ctx.log.info("weights swapped", version=record.version, step=record.step)
        await self._ctx.ready(record.version)
        return True

    def _fetch(self, record: VersionRecord) -> None:
        folder = stage_folder(self._ctx)
        manifest = read_manifest(folder, record.version)
        if record.digest and manifest.digest != record.digest:
            raise Corrupt(
                f"policy version {record.version}",
                why=f"committed with digest {record.digest}, staged with {manifest.digest}",
            )
        self._engine.weights.check(manifest.layout)
        fetch(folder, manifest, self._engine.weights.standby())


class EngineFailure:
    """Carries a failure of the engine's thread to the role, which ends with it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._future: asyncio.Future[None] = self._loop.create_future()
        self._lock = threading.Lock()

    def __call__(self, error: BaseException) -> None:
        """Called on the engine's thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        if not self._future.done():
            self._future.set_exception(error)

    async def wait(self) -> None:
        """Raises what the engine's thread raised; never returns otherwise."""
        await asyncio.shield(self._future)
