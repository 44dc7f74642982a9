"""What roles that consume a task of the queue have in common."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_rt.interfaces.role import RoleContext
    from relax_rt.transport.queue.client import LeasedBatch, QueueClient

TAKE_WAIT_S = 30.0


async def take_unless_stopped(
    queue: QueueClient, task: str, samples: int, stop: asyncio.Task[Any], groups: int = 0
) -> LeasedBatch | None:
    """A batch, an empty one after TAKE_WAIT_S, or None once `stop` is done.

    Args:
        samples: as many at most. groups: instead, exactly as many whole groups.
    """
    if groups:
        take = asyncio.create_task(queue.take(task, groups=groups, wait_s=TAKE_WAIT_S))
    else:
        take = asyncio.create_task(queue.take(task, samples=samples, wait_s=TAKE_WAIT_S))
    try:
        await asyncio.wait([take, stop], return_when=asyncio.FIRST_COMPLETED)
        return take.result() if take.done() else None
    finally:
        # Cancelled, it gives back what it is granted too late.
        take.cancel()


async def consume(
    ctx: RoleContext,
    queue: QueueClient,
    task: str,
    samples: int,
    work: Callable[[LeasedBatch], Awaitable[None]],
    lacks: str,
    *,
    groups: int = 0,
) -> None:
    """Open the queue, be ready, and give every batch of a task to `work` until the role is to stop.

    Args:
        samples: of a batch at most. groups: instead, exactly as many whole groups.
        lacks: what is waited for where the queue does not say it.
    """
    stop = asyncio.create_task(ctx.stopping.wait())
    try:
        async with queue:
            await ctx.ready()
            while not stop.done():
                batch = await take_unless_stopped(queue, task, samples, stop, groups)
                if batch:
                    ctx.progress.waiting("")
                    await work(batch)
                elif batch is not None:
                    ctx.progress.waiting(batch.waiting_on or lacks)
    finally:
        stop.cancel()
