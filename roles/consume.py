"""What roles that consume a task of the queue have in common."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from relax_rt.transport.queue.client import LeasedBatch, QueueClient

TAKE_WAIT_S = 30.0


async def take_unless_stopped(
    queue: QueueClient, task: str, samples: int, stop: asyncio.Task[Any]
) -> LeasedBatch | None:
    """A batch, an empty one after TAKE_WAIT_S, or None once `stop` is done.

    Args:
        samples: as many at most.
    """
    take = asyncio.create_task(queue.take(task, samples=samples, wait_s=TAKE_WAIT_S))
    try:
        await asyncio.wait([take, stop], return_when=asyncio.FIRST_COMPLETED)
        return take.result() if take.done() else None
    finally:
        # Cancelled, it gives back what it is granted too late.
        take.cancel()
