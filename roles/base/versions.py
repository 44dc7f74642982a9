"""Follows the policy versions that the registry has committed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

WATCH_S = 20.0
RETRY_S = 0.2


async def committed_versions(ctx: RoleContext) -> AsyncIterator[VersionRecord]:
    """Yield each newly committed version, the newest only, until the role stops; the wait for the first is visible.

    A registry that is away is waited for: engines keep the weights that they have.
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
