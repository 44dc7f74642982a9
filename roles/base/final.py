"""When the last weights of a run are its last."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

POLL_S = 0.2


async def is_final(ctx: RoleContext, record: VersionRecord) -> bool:
    """Wait for the checkpoint of the last step, whose weights these are. False: the trainer died before it was written,
    and works on another version.

    Queue and registry say so, which are heard on every node; if they are away they are waited for.
    """
    ctx.progress.waiting("the final checkpoint")
    queue = await ctx.queue()
    while True:
        with suppress(Unreachable, DeadlineExceeded):
            # In this order: a checkpoint that is there is of no newer version than the registry names after that.
            written = (await queue.stats()).committed >= record.step
            known = await ctx.registry.versions()
            if known and known[-1].version > record.version:
                return False
            if written:
                return True
        await asyncio.sleep(POLL_S)
