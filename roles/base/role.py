"""Base class of the RL job's roles: config tables by type, the queue client, and what is closed at the end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from relax_rt.config.schema import MIB, RoleSettings, Table
from relax_rt.interfaces.role import Role, RoleContext
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.queue.batch import LeasedBatch
from relax_rt.transport.queue.client import QueueClient
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

S = TypeVar("S", bound=RoleSettings)
T = TypeVar("T", bound=Table)
R = TypeVar("R")

PEER_WAIT_S = 600.0
TAKE_WAIT_S = 30.0
FETCH_S = 10.0
"""Limit for payload of another node, whose owner may be dead; then the lease is released and its samples come again."""
FINAL_POLL_S = 0.2


class RLRole(Role, Generic[S]):
    """Base of the RL job's roles; `S` is the type of the role's own table, which `Settings` names as well.

    What a role opens in `setup` or `run` it enters into `resources`; `teardown` closes these in reverse order, also
    after an error in `setup`, and the remaining ones also when one of them fails to close. A role that has more to do
    at its end overrides `teardown` and calls this one last.
    """

    settings: S
    queue: QueueClient
    """There after `open_queue`."""

    def __init__(self, ctx: RoleContext) -> None:
        super().__init__(ctx)
        assert isinstance(ctx.settings, self.Settings), f"{self.kind}: {type(ctx.settings).__name__}"
        self.settings = cast("S", ctx.settings)
        self.config = ctx.config
        self.config_dir = Path(ctx.config.config_dir)
        """The folder that relative paths of the config start from."""
        self.resources = AsyncExitStack()

    def table(self, kind: type[T]) -> T:
        """Return the config's table of this type.

        Raises:
            RelaxError: the run's job has no such table.
        """
        return self.config.table(kind)

    async def open_queue(
        self,
        *,
        slab_bytes: int = 0,
        capacity_bytes: int = 0,
        length_field: str = "",
        fetch_s: float = 0.0,
        on_lost: Callable[[list[int]], None] | None = None,
    ) -> None:
        """Open `queue`, and close it at the end.

        Args:
            slab_bytes, capacity_bytes: shared memory of this process; 0: as [queue] says.
            length_field, fetch_s, on_lost: see QueueClient.
        """
        ctx, table = self.ctx, self.config.queue
        client = QueueClient(
            await ctx.queue(),
            ctx.who,
            ctx.payload_dir,
            spill_dir=ctx.spill_dir,
            slab_bytes=slab_bytes or table.slab_mib * MIB,
            capacity_bytes=capacity_bytes or table.capacity_mib * MIB,
            length_field=length_field,
            on_lost=on_lost,
            fetcher=ctx.fetcher,
            fetch_s=fetch_s,
            on_wait=ctx.progress.waiting,
        )
        self.queue = await self.resources.enter_async_context(client)

    async def consume(
        self,
        task: str,
        samples: int,
        work: Callable[[LeasedBatch], Awaitable[None]],
        lacks: str,
        *,
        groups: int = 0,
    ) -> None:
        """Report ready, and give every batch of a task to `work` until the role is asked to stop.

        Args:
            samples: of a batch at most. groups: instead, exactly as many whole groups.
            lacks: what is waited for where the queue does not say it.
        """
        stop = asyncio.create_task(self.ctx.stopping.wait())
        try:
            await self.ctx.ready()
            while not stop.done():
                batch = await self._take(task, samples, groups, stop)
                if batch:
                    self.ctx.progress.waiting("")
                    await work(batch)
                elif batch is not None:
                    self.ctx.progress.waiting(batch.waiting_on or lacks)
        finally:
            stop.cancel()

    async def _take(self, task: str, samples: int, groups: int, stop: asyncio.Task[Any]) -> LeasedBatch | None:
        """Return a batch, an empty one after TAKE_WAIT_S, or None once `stop` is done."""
        samples = 0 if groups else samples
        take = asyncio.create_task(self.queue.lease(task, samples=samples, groups=groups, wait_s=TAKE_WAIT_S))
        try:
            await asyncio.wait([take, stop], return_when=asyncio.FIRST_COMPLETED)
            return take.result() if take.done() else None
        finally:
            # Cancelled, it gives back what it is granted too late.
            take.cancel()

    async def is_final(self, record: VersionRecord) -> bool:
        """Wait for the checkpoint of the last step, whose weights these are.

        Queue and registry say when it is written, and both are heard on every node; one that is away is waited for.

        Returns:
            False: the trainer died before it was written, and works on another version.
        """
        self.ctx.progress.waiting("the final checkpoint")
        queue = await self.ctx.queue()
        while True:
            with suppress(Unreachable, DeadlineExceeded):
                # In this order: a checkpoint that is there is of no newer version than the registry names after that.
                written = (await queue.stats()).committed >= record.step
                known = await self.ctx.registry.versions()
                if known and known[-1].version > record.version:
                    return False
                if written:
                    return True
            await asyncio.sleep(FINAL_POLL_S)

    async def teardown(self) -> None:
        await self.resources.aclose()


async def wait_for_peer(ctx: RoleContext, call: Callable[[], Awaitable[R]], name: str = "the registry") -> R:
    """Repeat a call until the peer answers it, at most PEER_WAIT_S; the wait is visible in the role's progress.

    The absence of the registry or the queue must not cost the step that was just taken.
    """
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
