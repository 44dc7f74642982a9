"""When the last weights of a run are its last."""

from __future__ import annotations

import asyncio

import msgspec

from relax_rt.role import RoleContext
from relax_rt.transport.versions import VersionRecord

POLL_S = 0.2


async def is_final(ctx: RoleContext, record: VersionRecord) -> bool:
    """Wait for the checkpoint of the weights of the last step. False: the trainer died before it was written, and works
    on another version."""
    from relax_rt.roles.trainers.checkpoint import STATE_FILE, CheckpointState

    ctx.progress.waiting("the final checkpoint")
    path = ctx.run_dir / "checkpoints" / f"step-{record.step:06d}" / STATE_FILE
    while True:
        if path.exists() and msgspec.json.decode(path.read_bytes(), type=CheckpointState).digest == record.digest:
            return True
        known = await ctx.registry.versions()
        if known and known[-1].version > record.version:
            return False
        await asyncio.sleep(POLL_S)
