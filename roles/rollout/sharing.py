"""A rollout whose engine has its device in turns with the trainer: how it leaves it, and how it comes back."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.roles.models.heap import trim_heap
from relax_rt.roles.rollout.engines.settings import ColocationTable
from relax_rt.roles.rollout.engines.turns import EngineTurns
from relax_rt.transport.base.versions import VersionRecord
from relax_rt.transport.rpc.errors import DeadlineExceeded, Unreachable

if TYPE_CHECKING:
    from relax_rt.roles.rollout.role import RolloutRole

WHY = "the trainer's turn on the device"
LOOK_EVERY_S = 0.02
RETRY_S = 0.2


class SharedDevice:
    """The rollout's part in the turns. What is in flight when it leaves goes back to the queue with its tokens, and is
    gone on with by whichever rollout asks for it first afterwards."""

    def __init__(self, role: RolloutRole) -> None:
        self._role = role
        table = role.table(ColocationTable)
        self.turns = EngineTurns(
            role.ctx, self._leave, self._back, give_way_s=table.give_way_s, take_back_s=table.take_back_s
        )

    async def _leave(self) -> None:
        role, engine = self._role, self._role.engine
        await role.gate.close()
        role.generation.pause(WHY)
        role.give_up(list(role.work.jobs.values()), WHY)
        # What has ended is put on the queue, and what has not is marked and given back, by the role's own tasks.
        while role.work.jobs or (load := engine.load()).running or load.waiting:  # noqa: ASYNC110 - nothing tells of both
            await asyncio.sleep(LOOK_EVERY_S)
        before = _resident()
        # A version was committed to it, and will be again: they need not be kept.
        await engine.release_memory(keep_weights=not role.follower.record.version)
        await asyncio.to_thread(trim_heap)
        role.ctx.event("engine_memory", resident_mib=_resident(), before_mib=before)

    async def _back(self) -> None:
        role = self._role
        await role.engine.resume_memory()
        if role.follower.record.version:
            await self._follow_newest()
        role.generation.resume()
        role.gate.open()

    async def _follow_newest(self) -> None:
        while not await self._role.follow(await self._newest(), again=True):
            continue  # a newer one took its place

    async def _newest(self) -> VersionRecord:
        """The newest committed version."""
        while True:
            try:
                known = await self._role.ctx.registry.watch(0, 0.0)
            except (Unreachable, DeadlineExceeded):
                await asyncio.sleep(RETRY_S)
                continue
            assert known.committed is not None, "this engine had a committed version before"
            return known.committed


def _resident() -> float:
    """Memory of this process that is its own, MiB."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return round((resident - shared) * os.sysconf("SC_PAGESIZE") / (1 << 20), 1)
