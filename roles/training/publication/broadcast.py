"""The trainer's broadcasts: each committed version into the memories that engines of its node offer, behind everything.

Nobody waits for a broadcast but the engines that it serves, and those no longer than it may take. Whom it does not
serve, or loses, takes the version from the stage.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from relax_rt.interfaces.role import RoleContext
from relax_rt.roles.base.locations import offers_folder, stage_folder
from relax_rt.roles.training.publication.settings import Communicator, PublicationTable
from relax_rt.transport.rpc.errors import RelaxError
from relax_rt.transport.weights.broadcast.machine import BroadcastLimits
from relax_rt.transport.weights.broadcast.protocol import BroadcastFailed
from relax_rt.transport.weights.broadcast.receivers import BroadcastReceivers, ReservedReceivers
from relax_rt.transport.weights.manifest import Manifest

if TYPE_CHECKING:
    from relax_rt.transport.weights.broadcast.group import BroadcastGroup
    from relax_rt.transport.weights.broadcast.source import SendBuffer

ROOT = "trainer"
START_S = 120.0
"""For a rank's process, which imports the library, on a machine that is busy; no broadcast waits for it."""


def limits_of(timeout_s: float) -> BroadcastLimits:
    """Deadlines of a broadcast's steps, so that within its time the others can go on without one that is lost."""
    step = timeout_s / 4
    return BroadcastLimits(hello_s=2 * step, start_s=START_S, join_s=step, stall_s=step, abort_s=min(5.0, step / 2))


class WeightBroadcaster:
    """Broadcasts one version after the other. Call it on the event loop.

    A version that is committed while the one before is still under way is not broadcast: engines take it from the
    stage. So does an engine whose rank is not there yet: processes are started ahead, and no version waits for one.
    A rank whose process never comes up is given up, the trainer's own with all broadcasts, and an event says why.
    """

    def __init__(self, ctx: RoleContext, stage: Path, timeout_s: float, communicator: Communicator) -> None:
        self._ctx, self._stage, self._timeout_s = ctx, stage, timeout_s
        self._kind = communicator
        self._receivers = BroadcastReceivers(offers_folder(ctx))
        self._reserved: ReservedReceivers | None = None
        self._manifest: Manifest | None = None
        self._group: BroadcastGroup | None = None
        self._given_up: set[str] = set()
        self._send_buffer: SendBuffer
        self._opening = asyncio.create_task(self._open())
        self.current: asyncio.Task[None] | None = None

    @classmethod
    def of(cls, ctx: RoleContext, table: PublicationTable, communicator: Communicator) -> WeightBroadcaster | None:
        """Make the broadcaster that the config asks for; None: no broadcasts."""
        if table.carrier != "collective":
            return None
        return cls(ctx, stage_folder(ctx), table.broadcast_timeout_s, communicator)

    async def reserve(self, manifest: Manifest) -> None:
        """Reserve the receivers of a version; call it before the commit."""
        self._drop("it was not committed")
        if self._group is None or (self.current is not None and not self.current.done()):
            return
        with suppress(OSError):
            there = await self._ready()
            if ROOT not in there:
                return
            self._reserved = await asyncio.to_thread(
                self._receivers.reserve, manifest.version, manifest.digest, manifest.sent_bytes, self._timeout_s, there
            )
            self._manifest = manifest

    async def _ready(self) -> frozenset[str]:
        """The ranks that can be broadcast to; those of other engines are started for the next version."""
        from relax_rt.transport.weights.broadcast.group import RankSpec

        assert self._group is not None
        registered = await asyncio.to_thread(self._receivers.registered)
        for receiver in registered:
            self._group.admit(RankSpec(receiver.slot, receiver.device))
        self._group.prestart(ROOT, *(receiver.slot for receiver in registered))
        there, given_up = self._group.present, self._group.given_up
        for slot in given_up.keys() - self._given_up - {ROOT}:
            self._given_up.add(slot)
            self._ctx.event("broadcast_rank_removed", communicator=self._kind, engine=slot, why=given_up[slot])
        if ROOT in given_up:
            await self._off(given_up[ROOT])
        return there

    async def _off(self, why: str) -> None:
        """There are no broadcasts any more."""
        self._ctx.event("broadcast_disabled", communicator=self._kind, why=why)
        self._ctx.log.warning("weights are not broadcast", why=why)
        group, self._group = self._group, None
        if group is not None:
            await group.__aexit__(None, None, None)

    def start(self) -> None:
        """Broadcast the committed version in the background."""
        reserved, manifest, self._reserved = self._reserved, self._manifest, None
        if reserved is not None and manifest is not None:
            self.current = asyncio.create_task(self._send(manifest, reserved))

    async def retire(self, committed: int) -> None:
        """Forget the broadcasts of versions before the committed one."""
        await asyncio.to_thread(self._receivers.retire, committed)

    async def close(self) -> None:
        """Give up what is under way, and end the processes."""
        self._drop("the trainer ends")
        tasks = [task for task in (self._opening, self.current) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._group is not None:
            await self._group.__aexit__(None, None, None)
            self._group = None

    def _drop(self, why: str) -> None:
        if (reserved := self._reserved) is not None:
            self._reserved = None
            reserved.finish(dict.fromkeys(reserved.receivers, why))

    async def _open(self) -> None:
        """Behind the start of the trainer: until it is done, nothing is broadcast."""
        from relax_rt.transport.weights.broadcast.group import GLOO, NCCL, BroadcastGroup, RankSpec
        from relax_rt.transport.weights.broadcast.source import DeviceSendBuffer, host_send_buffer

        nccl = self._kind == "nccl"
        root = RankSpec(ROOT, _own_device() if nccl else "")
        group = BroadcastGroup([root], NCCL if nccl else GLOO, limits_of(self._timeout_s))
        self._send_buffer = DeviceSendBuffer() if nccl else host_send_buffer
        try:
            await group.__aenter__()
            group.prestart(ROOT)
        except (RelaxError, ImportError, OSError) as error:
            await self._off(str(error))
            return
        self._group = group

    async def _send(self, manifest: Manifest, reserved: ReservedReceivers) -> None:
        from relax_rt.transport.weights.broadcast.source import broadcast_version

        assert self._group is not None
        began, error, unusable = time.monotonic(), "", False
        lost = dict.fromkeys(reserved.receivers, "the trainer ends")
        try:
            memories = {slot: receiver.memory for slot, receiver in reserved.receivers.items()}
            outcome = await broadcast_version(
                self._group, ROOT, self._stage, manifest, memories, self._timeout_s, send_buffer=self._send_buffer
            )
            lost = {one.member: f"{one.fate}: {one.why}" for one in outcome.lost}
        except BroadcastFailed as failed:
            error = str(failed)
            if failed.outcome is not None:
                lost = {one.member: f"{one.fate}: {one.why}" for one in failed.outcome.lost}
            else:
                lost, unusable = dict.fromkeys(reserved.receivers, error), True
        except (RelaxError, OSError) as failed:
            error = str(failed)
            lost = dict.fromkeys(reserved.receivers, error)
        finally:
            reserved.finish(lost, unusable)
        self._ctx.event(
            "weights_broadcast",
            version=manifest.version,
            communicator=self._kind,
            bytes=manifest.sent_bytes,
            engines=sorted(set(reserved.receivers) - set(lost)),
            lost=lost,
            why=error,
            seconds=round(time.monotonic() - began, 4),
        )


def _own_device() -> str:
    """The first device that this process sees."""
    return os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
