"""Calls that wait out the absence of the registry or the queue: it must not cost the step that was just taken."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from relax_rt.interfaces.role import RoleContext
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

T = TypeVar("T")

PEER_WAIT_S = 600.0


async def wait_for_peer(ctx: RoleContext, call: Callable[[], Awaitable[T]], name: str = "the registry") -> T:
    """Repeat a call until the peer answers it, at most PEER_WAIT_S; the wait is visible in the role's progress."""
    deadline = time.monotonic() + PEER_WAIT_S
    while True:
        try:
            answer = await call()
        except (Unreachable, DeadlineExceeded) as error:
            if time.monotonic() > deadline:
                raise
            ctx.progress.waiting(f"{name}: {error}")
            continue
        ctx.progress.waiting("")
        return answer
